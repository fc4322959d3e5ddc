"""Tests the Python environment, the tiny policy's task with tools, and maths tasks with turns, without training."""

import inspect
import json
import subprocess
import sys
from functools import partial
from statistics import mean

import pytest
from hydra.utils import instantiate
from transformers.utils import get_json_schema
from trl.chat_template_utils import parse_response

from otb.methods.tool_calls import every_call_readable, read_codes
from otb.sandbox import Result
from otb.tasks.arithmetic import Arithmetic, running_totals
from otb.tasks.arithmetic_tools import ArithmeticTools
from otb.tasks.maths import Maths
from otb.tasks.python_tool import MALFORMED, NO_OUTPUT, PythonTool, ToolUse
from tests.support.commands import ROOT
from tests.support.recipes import composed
from tests.support.tool_trainers import FakeSandbox
from tests.support.waiting import PATIENCE_SECONDS


def rewards(task, chats):
    """Returns the task's rewards of its own demonstrations."""
    answers = [str(running_totals(chat[1]["content"])[-1]) for chat in chats]
    return task.reward([chat[2:] for chat in chats], answers)


# ---- the environment


@pytest.mark.parametrize(
    ("result", "text", "use"),
    [
        (Result("ok", "7\n", "", 0.5), "7", ToolUse(calls=1, seconds=0.5)),
        (Result("ok", "", "", 0.5), NO_OUTPUT, ToolUse(calls=1, seconds=0.5)),
        (Result("user_error", "1\n", "Error", 0.5), "1\nError", ToolUse(calls=1, failed=1, seconds=0.5)),
        (Result("timeout", "", "late", 5.0), "late", ToolUse(calls=1, limited=1, seconds=5.0)),
        (Result("memory", "", "big", 0.5), "big", ToolUse(calls=1, limited=1, seconds=0.5)),
        (Result("output_limit", "11", "long", 0.5), "11\nlong", ToolUse(calls=1, limited=1, seconds=0.5)),
    ],
)
def test_environment_answers_with_what_the_program_printed_and_counts_how_it_ended(result, text, use):
    environment = PythonTool(FakeSandbox({"code": result}))
    environment.reset(prompt=[], answer="7")
    assert environment.python("code") == text
    assert environment.use == use


def test_environment_gives_outcomes_that_are_there_already_in_the_order_of_the_calls():
    environment = PythonTool(sandbox := FakeSandbox())
    environment.outcomes.extend([Result("ok", "1", "", 0.5), MALFORMED])
    assert [environment.python("a"), environment.python(None), environment.python("c")] == ["1", MALFORMED.text, "c"]
    assert sandbox.batches == [["c"]]
    assert environment.use == ToolUse(calls=3, refused=1, seconds=0.75)


def test_environment_refuses_what_is_no_program():
    environment = PythonTool(sandbox := FakeSandbox())
    assert environment.python(["print(1)"]) == MALFORMED.text
    assert sandbox.batches == [] and environment.use.refused == 1


def test_reset_forgets_the_last_rollout():
    environment = PythonTool(FakeSandbox())
    environment.python("1")
    environment.outcomes.append(MALFORMED)
    environment.reset()
    assert environment.use == ToolUse() and not environment.outcomes


def test_python_is_the_only_tool_and_describes_itself():
    public = {name for name, _ in inspect.getmembers(PythonTool, inspect.isfunction) if not name.startswith("_")}
    assert public == {"python", "reset"}
    function = get_json_schema(PythonTool(FakeSandbox()).python)["function"]
    assert function["name"] == "python" and function["parameters"]["required"] == ["code"]


# ---- arithmetic with tools


def test_demonstrations_mix_mental_steps_and_calls_and_calls_are_right_more_often():
    task = ArithmeticTools()
    chats = task.demonstrations(seed=0, n=1000)
    called = [any(message["role"] == "tool" for message in chat) for chat in chats]
    mixed = [any("tool_calls" in message and message["content"] for message in chat) for chat in chats]
    right = {True: [], False: []}
    for by_python, reward in zip(called, rewards(task, chats), strict=True):
        right[by_python].append(reward)
    assert 0.4 < mean(called) < 0.7 and mean(mixed) > 0.1
    assert mean(right[True]) > mean(right[False]) + 0.2


def test_demonstrations_begin_as_trl_renders_a_prompt_with_the_tool(tokenizer):
    chat = ArithmeticTools().demonstrations(seed=0, n=1)[0]
    shown = tokenizer.apply_chat_template(chat, tokenize=False)
    python = PythonTool(FakeSandbox()).python
    asked = tokenizer.apply_chat_template(chat[1:2], tools=[python], add_generation_prompt=True, tokenize=False)
    assert shown.startswith(asked)


def test_what_demonstrations_say_is_read_back_as_the_calls_that_they_make(tokenizer):
    python = PythonTool(FakeSandbox()).python
    for chat in ArithmeticTools().demonstrations(seed=0, n=30):
        for at, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            before = tokenizer.apply_chat_template(chat[:at], add_generation_prompt=True)["input_ids"]
            after = tokenizer.apply_chat_template(chat[: at + 1])["input_ids"]
            with every_call_readable(tokenizer, [tokenizer.eos_token_id]):
                codes = read_codes(tokenizer, after[len(before) : -1], before, [python])
            assert codes == [call["function"]["arguments"]["code"] for call in message.get("tool_calls", [])]


def test_a_turn_is_parsed_once_however_often_it_is_read(tokenizer, monkeypatch):
    parse, parsed = tokenizer.parse_response, []
    monkeypatch.setattr(
        type(tokenizer), "parse_response", lambda _, ids, **options: parsed.append(ids) or parse(ids, **options)
    )
    turn = tokenizer('<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call><|im_end|>')["input_ids"]
    before, other = (
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in ("1+1", "2+2")
    )
    with every_call_readable(tokenizer, [tokenizer.eos_token_id]):
        first, again = (parse_response(tokenizer, turn, prefix=before) for _ in range(2))
        assert first == again and first["tool_calls"] is not again["tool_calls"]
        assert len(parsed) == 1
        parse_response(tokenizer, turn, prefix=other)
        assert len(parsed) == 2


def test_demonstrations_fit_the_budget_but_a_few(tokenizer):
    task = ArithmeticTools()
    chats = task.demonstrations(seed=0, n=500)
    prompts = tokenizer.apply_chat_template([chat[:2] for chat in chats], add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template(chats)["input_ids"]
    lengths = [len(all_of) - len(prompt) for all_of, prompt in zip(whole, prompts, strict=True)]
    assert mean(length > task.max_completion_length for length in lengths) < 0.1


def test_problems_are_those_of_arithmetic():
    tools, plain = ArithmeticTools(eval_prompts=20), Arithmetic(eval_prompts=20)
    assert tools.eval_dataset().to_list() == plain.eval_dataset().to_list()


@pytest.mark.parametrize(
    "build", [ArithmeticTools, partial(Maths, "m", "x", "question", "answer", max_completion_length=64)]
)
def test_one_turn_is_refused_as_it_could_call_and_never_answer(build):
    with pytest.raises(ValueError, match="max_turns=1.* at least 2. Try max_turns=5"):
        build(max_turns=1)


# ---- maths with tools


@pytest.mark.parametrize(
    ("name", "turns"),
    [("gsm8k_tools", 5), ("dapo_math_tools", 5), ("dpao_filter_tools", 5), ("math_lvl3to5_tools", 5), ("gsm8k", None)],
)
def test_maths_tasks_with_turns_have_the_environment(name, turns):
    task = instantiate(composed(f"+task={name}", command=None).task)
    assert (task.name, task.max_turns) == (name, turns)
    assert task.environment is (PythonTool if turns else None)


def test_gsm8k_with_tools_tells_the_policy_of_python_and_grades_its_last_words(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": "3+4?", "answer": "#### 7"}) + "\n")
    task = instantiate(composed("+task=gsm8k_tools", f"task.path={tmp_path}", command=None).task)
    system, user = task.train_dataset()[0]["prompt"]
    assert "python" in system["content"] and "\\boxed" in user["content"]
    box, call = "\\boxed{7}", {"role": "assistant", "content": "", "tool_calls": [{}]}
    said = {
        "own": [call, {"role": "tool", "content": "7"}, {"role": "assistant", "content": box}],
        "in the tool's output": [call, {"role": "tool", "content": box}, {"role": "assistant", "content": "done"}],
        "cut": [call, {"role": "tool", "content": box}],
        "before the last call": [{"role": "assistant", "content": box}, call],
    }
    assert task.reward(list(said.values()), ["7"] * len(said)) == [1.0, 0.0, 0.0, 0.0]


# ---- the command line


def refusal(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "experiments" / "run.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("sandbox=http", "sandbox.url is not set"),
        ("sandbox=bubblewarp", "Did you mean bubblewrap?"),
        ("sandbox.limits.wall_seconds=0", "wall_seconds=0"),
        ("trainer.max_tool_calling_iterations=3", "set task.max_turns instead"),
        ("task.max_turns=1", "task.max_turns=1 must be at least 2"),
    ],
)
def test_what_a_tool_run_cannot_use_is_refused_before_anything_is_loaded(argument, message, tmp_path):
    assert message in refusal("task=arithmetic_tools", argument, f"runs_dir={tmp_path}")


def test_a_machine_without_bubblewrap_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    printed = refusal("task=arithmetic_tools", f"runs_dir={tmp_path}")
    assert "apt-get install bubblewrap" in printed and "Traceback" not in printed
