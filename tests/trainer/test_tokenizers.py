"""Tests tokenizers like real models' from prompt to loss: BOS, padding with the end token, ends of turns.

Each is the tiny tokenizer with one thing changed.
"""

import copy

import pytest
import torch
from datasets import Dataset
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from otb.policies.models import describe_policy
from otb.policies.templates import PLAIN, set_chat_template
from otb.policies.tiny_policy import CHAT_TEMPLATE, END, PAD, START, TOOL_TAGS
from tests.support.trainers import RecordingTrainer, byte_reward, config, recorded

BOS = TOOL_TAGS[0]  # any special token that no template here writes by itself
OTHER_END = TOOL_TAGS[1]
CHATS = [
    [{"role": "user", "content": "1+2"}],
    [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "3+4"},
    ],
]


def with_bos(tokenizer):
    """Returns a tokenizer that puts BOS before every text, as Llama's does."""
    changed = copy.deepcopy(tokenizer)
    changed.bos_token = BOS
    changed.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, changed.bos_token_id)]
    )
    assert changed("1+2")["input_ids"][0] == changed.bos_token_id
    return changed


def sampled(tmp_path, model, tokenizer, chats=CHATS, **options) -> tuple[dict, RecordingTrainer]:
    """Returns one generation's batch for the loss: a group of 4 for each chat."""
    rows = Dataset.from_list([{"prompt": chat} for chat in chats])
    options = {"per_device_train_batch_size": 4 * len(chats), "max_steps": 1} | options
    settings = config(tmp_path, **options)
    trainer = RecordingTrainer(model, byte_reward, settings, rows, processing_class=tokenizer)
    trainer.train()
    return trainer.batches[0][0], trainer


def prompts_of(output) -> set[tuple[int, ...]]:
    rows = zip(output["prompt_ids"], output["prompt_mask"].bool(), strict=True)
    return {tuple(ids[kept].tolist()) for ids, kept in rows}


# ---- BOS


@pytest.mark.parametrize("template", ["{{- bos_token }}" + CHAT_TEMPLATE, CHAT_TEMPLATE], ids=["writes BOS", "none"])
def test_prompts_have_the_begin_token_that_the_template_writes_and_no_second_one(
    tmp_path, untrained, tokenizer, template
):
    """Prompts are chat lists, one of them with a system message and an earlier turn."""
    changed = with_bos(tokenizer)
    changed.chat_template = template
    output, _ = sampled(tmp_path, untrained, changed)
    texts = [changed.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS]
    assert prompts_of(output) == {tuple(changed(text, add_special_tokens=False)["input_ids"]) for text in texts}
    count = int(template != CHAT_TEMPLATE)
    assert {ids.count(changed.bos_token_id) for ids in prompts_of(output)} == {count}
    assert all(START in text for text in texts) and "You add." in texts[1]


def test_plain_template_writes_the_begin_token_of_a_tokenizer_that_adds_one(tokenizer):
    changed = with_bos(tokenizer)
    set_chat_template(changed, "plain", "base")
    ids = changed.apply_chat_template(CHATS[0], add_generation_prompt=True)["input_ids"]
    assert changed.decode(ids) == f"{BOS}Question: 1+2\nAnswer:" and ids.count(changed.bos_token_id) == 1
    set_chat_template(plain := copy.deepcopy(tokenizer), "plain", "base")
    assert plain.chat_template == PLAIN


# ---- padding


def test_training_is_the_same_whatever_token_pads(tmp_path, untrained, tokenizer):
    """Padding enters neither a baseline nor the loss. Without a padding token, TRL pads with the end token."""
    changed = copy.deepcopy(tokenizer)
    changed.pad_token = None
    ends = [changed.eos_token_id, *untrained.generation_config.eos_token_id]
    trained = {}
    for name, one in (("own", tokenizer), ("end", changed)):
        trainer = recorded(tmp_path / name, copy.deepcopy(untrained), one)
        trained[name] = trainer
    assert changed.pad_token_id == changed.eos_token_id
    for (mine, expected), (other, _) in zip(trained["end"].batches, trained["own"].batches, strict=True):
        kept = mine["completion_mask"].bool()
        assert torch.equal(kept, other["completion_mask"].bool()) and not kept.all()
        assert torch.equal(mine["completion_ids"][kept], other["completion_ids"][kept])
        assert (mine["completion_ids"][~kept] == changed.eos_token_id).all()
        lengths = kept.sum(1)
        last = mine["completion_ids"].gather(1, lengths.unsqueeze(1) - 1).squeeze(1)
        ended = lengths < kept.size(1)
        assert torch.isin(last[ended], torch.tensor(ends)).all()  # the end is an own token, and counts
        torch.testing.assert_close(mine["advantages"].double(), expected, atol=1e-4, rtol=0)
        assert torch.equal(mine["advantages"], other["advantages"])
    rows = [[log for log in trained[name].state.log_history if "own_tokens" in log] for name in ("own", "end")]
    assert [row["own_tokens"] for row in rows[0]] == [row["own_tokens"] for row in rows[1]]
    weights = [trained[name].model.state_dict() for name in ("own", "end")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


# ---- ends of turns


def test_a_base_models_rollouts_end_with_the_token_that_ends_the_turn(tmp_path, tokenizer, untrained):
    """The model's end token differs; the token that ends the turn is an own token, counted and trained."""
    changed = copy.deepcopy(tokenizer)
    changed.eos_token, changed.chat_template = PAD, CHAT_TEMPLATE.replace(END, OTHER_END)
    end = tokenizer.convert_tokens_to_ids(OTHER_END)
    untrained.generation_config.eos_token_id = changed.eos_token_id
    untrained.save_pretrained(tmp_path / "base")
    changed.save_pretrained(tmp_path / "base")
    described, _ = describe_policy(str(tmp_path / "base"), None)
    assert (described.eos_token, described.pad_token) == (OTHER_END, PAD)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    output, trainer = sampled(
        tmp_path, model, described, num_generations=32, per_device_train_batch_size=64, max_completion_length=24
    )
    assert set(trainer.eos_token_ids) == {end, changed.eos_token_id}
    ended = 0
    for ids, kept in zip(output["completion_ids"].tolist(), output["completion_mask"].sum(1).tolist(), strict=True):
        assert not {end, changed.eos_token_id} & set(ids[: kept - 1])
        assert ids[kept:] == [described.pad_token_id] * (len(ids) - kept)
        ended += ids[kept - 1] == end
    assert ended > 2
