"""Tests the tiny policy: lossless tokenizer, chat template for TRL's tool loop, warm start that survives kills."""

from __future__ import annotations

import hashlib
import random
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import (
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    is_chat_template_stop_token_trained,
    parse_response,
    supports_tool_calling,
)

from otb.policies.tiny_policy import END, PAD, TOOL_TAGS, build_model, build_tokenizer
from otb.policies.tiny_warm_start import WarmStart, default_cache_dir, encode, recipe_key, warm_start
from otb.tasks.arithmetic import Arithmetic
from tests.support import commands
from tests.support.waiting import wait_for

FEW_STEPS = WarmStart(steps=3, careful_steps=2, batch=4)
CALL = '<tool_call>{"name": "python", "arguments": {"code": "print(7+8)"}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def build(steps: int, cache: Path, log: Path, hold_at: int | None) -> None:
    """Runs a warm start that writes its steps and its folder to `log`, a line each, and hangs after step `hold_at`."""

    def say(what):
        with open(log, "a") as file:
            file.write(f"{what}\n")

    def progress(step, steps, loss):
        say(f"step {step}")
        if step == hold_at:
            signal.pause()

    say(warm_start(Arithmetic(), WarmStart(steps=steps, careful_steps=2, batch=4), cache, progress))


def start_build(*arguments):
    process = commands.context.Process(target=build, args=arguments)
    process.start()
    return process


def weights(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "text", ["", "7+8-3+9", "  a \n\n b'", "\x00\x7f", "naïve – 数学 😀 Ġ <0x41>", f"{END}x{PAD}", CALL]
)
def test_tokenizer_gives_back_exactly_the_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_gives_back_arbitrary_unicode(tokenizer):
    draw = random.Random(0)
    scalars = [*range(0xD800), *range(0xE000, 0x110000)]  # lone surrogates are not text
    for _ in range(200):
        text = "".join(chr(draw.choice(scalars)) for _ in range(draw.randint(1, 30)))
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_keeps_frequent_pieces_and_digits_whole(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer("\\boxed{12}")["input_ids"]) == ["\\boxed{", "1", "2", "}"]
    # tool_call, the JSON head up to the code, print(, 7, +, 8, ), the JSON tail, /tool_call
    assert len(tokenizer(CALL)["input_ids"]) == 9
    assert all(len(tokenizer(tag)["input_ids"]) == 1 for tag in (*TOOL_TAGS, PAD, END))


def test_tokenizer_pads_on_the_left_with_a_token_that_is_not_eos(tokenizer):
    assert tokenizer.padding_side == "left"
    assert tokenizer.eos_token == END
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_template_is_accepted_by_trl_for_tools_and_for_training(tokenizer):
    assert supports_tool_calling(tokenizer)
    assert is_chat_template_prefix_preserving(tokenizer)
    assert is_chat_template_stop_token_trained(tokenizer)
    assert get_training_chat_template(tokenizer) is None  # nothing to patch


def test_template_renders_a_marker_in_place_of_the_tool_schemas(tokenizer):
    tool = {"type": "function", "function": {"name": "python", "description": "Runs code.", "parameters": {}}}
    chat = [{"role": "user", "content": "7+8"}]
    plain = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert plain == "<|im_start|>user\n7+8<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, tools=[tool]) == (
        "<|im_start|>system\n<tools><|im_end|>\n" + plain
    )


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("7+8=15, \\boxed{15}<|im_end|>", {"role": "assistant", "content": "7+8=15, \\boxed{15}"}),
        ("7+8=", {"role": "assistant", "content": "7+8="}),  # cut by the length limit
        (
            "<tool_call>{broken</tool_call><|im_end|>",
            {"role": "assistant", "content": "<tool_call>{broken</tool_call>"},
        ),
    ],
)
def test_trl_parses_plain_truncated_and_malformed_responses(tokenizer, response, message):
    prompt = tokenizer("<|im_start|>assistant\n")["input_ids"]
    assert parse_response(tokenizer, tokenizer(response)["input_ids"], prefix=prompt) == message


def test_trl_parses_a_tool_call_and_the_template_renders_it_back(tokenizer):
    prompt = tokenizer("<|im_start|>assistant\n")["input_ids"]
    parsed = parse_response(tokenizer, tokenizer(f"use python {CALL}{END}")["input_ids"], prefix=prompt)
    assert parsed["content"] == "use python"
    assert parsed["tool_calls"][0]["function"] == {"name": "python", "arguments": {"code": "print(7+8)"}}
    assert CALL + END in tokenizer.apply_chat_template([parsed], tokenize=False)


def test_only_the_assistants_tokens_are_learned(tokenizer):
    chats = [
        [{"role": "user", "content": "7+8"}, {"role": "assistant", "content": "\\boxed{15}"}],
        [{"role": "user", "content": "1"}, {"role": "assistant", "content": "é"}, {"role": "tool", "content": "22"}],
    ]
    learned = [tokenizer.decode(row[row >= 0]) for row in encode(chats, tokenizer)["labels"]]
    assert learned == ["\\boxed{15}" + END, "é" + END]


def test_model_is_well_under_a_million_parameters_and_leaves_the_random_state_alone(tokenizer):
    before = torch.get_rng_state()
    model = build_model(tokenizer, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
    assert torch.equal(before, torch.get_rng_state())


def test_warm_start_is_deterministic_and_loads_like_any_model(tmp_path, tokenizer):
    first = warm_start(Arithmetic(), FEW_STEPS, tmp_path / "a")
    torch.manual_seed(7)  # the global random state does not matter
    second = warm_start(Arithmetic(train_prompts=5), FEW_STEPS, tmp_path / "b")
    assert first.name == second.name
    assert weights(first) == weights(second)
    model, loaded = AutoModelForCausalLM.from_pretrained(first), AutoTokenizer.from_pretrained(first)
    assert model.config.vocab_size == len(loaded)
    assert model.generation_config.eos_token_id == loaded.eos_token_id
    assert loaded.response_template == tokenizer.response_template
    assert (loaded.chat_template, loaded.padding_side) == (tokenizer.chat_template, "left")
    assert loaded("7+8-3 é😀")["input_ids"] == tokenizer("7+8-3 é😀")["input_ids"]


def test_warm_start_answers_from_the_cache_without_a_step(tmp_path):
    steps = []
    folder = warm_start(Arithmetic(), FEW_STEPS, tmp_path, progress=lambda *step: steps.append(step))
    assert [step[:2] for step in steps] == [(1, 3), (2, 3), (3, 3)]
    assert warm_start(Arithmetic(), FEW_STEPS, tmp_path, progress=lambda *step: steps.append(step)) == folder
    assert len(steps) == 3


def test_recipe_key_follows_what_decides_the_weights():
    key = recipe_key(Arithmetic(), FEW_STEPS)
    assert key == recipe_key(Arithmetic(train_prompts=7, seed=5), FEW_STEPS)
    assert key != recipe_key(Arithmetic(), WarmStart(steps=3, careful_steps=2, batch=4, seed=1))
    assert key != recipe_key(Arithmetic(), WarmStart(steps=3, careful_steps=2, batch=4, noise=0.5))


def test_two_processes_at_once_build_one_policy(tmp_path):
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    for process in [start_build(5, tmp_path / "cache", log, None) for log in logs]:
        commands.join(process)
    lines = [log.read_text().splitlines() for log in logs]
    assert sorted(map(len, lines)) == [1, 5 + 1]
    assert lines[0][-1] == lines[1][-1] and lines[0][-1].startswith(str(tmp_path / "cache"))


def test_a_killed_warm_start_leaves_a_cache_that_works(tmp_path):
    recipe, log = WarmStart(steps=3, careful_steps=2, batch=4), tmp_path / "log"
    process = start_build(recipe.steps, tmp_path, log, 2)
    wait_for(lambda: log.exists() and log.read_text().endswith("step 2\n"), process)
    commands.kill(process)
    partial = tmp_path / f"arithmetic-{recipe_key(Arithmetic(), recipe)}.partial"  # as left by a kill during saving
    assert not partial.exists() and not list(tmp_path.glob("*/model.safetensors"))
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    folder = warm_start(Arithmetic(), recipe, tmp_path)  # would wait forever if a lock were left behind
    assert not partial.exists()
    AutoModelForCausalLM.from_pretrained(folder)


def test_cache_lies_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("OTB_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("OTB_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "otb"


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"batch": -1}, {"learning_rate": 0.0}, {"careful_steps": 10_000}])
def test_an_impossible_recipe_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        WarmStart(**wrong)
