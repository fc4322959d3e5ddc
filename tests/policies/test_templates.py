"""Tests the token that ends a turn, with TRL's copies of real templates and with a base model's other end token."""

import copy
from pathlib import Path

import pytest
import trl

from otb.errors import RunError
from otb.policies.templates import PLAIN, end_of_turn, set_chat_template, stop_at_end_of_turn

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
ENDS = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "phi3": "<|end|>",
}


@pytest.fixture
def base(tokenizer):
    """Returns a tokenizer whose end token differs from its template's end of turn, as in base models."""
    changed = copy.deepcopy(tokenizer)
    changed.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", *sorted(set(ENDS.values()))]})
    changed.pad_token = changed.eos_token = changed.bos_token = "<|endoftext|>"
    return changed


@pytest.mark.parametrize(("template", "end"), ENDS.items())
def test_end_of_turn_is_read_from_the_template(base, template, end):
    base.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    assert base.convert_ids_to_tokens(end_of_turn(base)) == end


def test_stop_at_end_of_turn_changes_the_end_token_and_not_the_padding(base):
    base.chat_template = (TEMPLATES / "qwen2_5.jinja").read_text()
    assert stop_at_end_of_turn(base)
    assert (base.eos_token, base.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert not stop_at_end_of_turn(base)  # done already


def test_stop_at_end_of_turn_leaves_the_tiny_policy_as_it_is(tokenizer):
    before = tokenizer.eos_token, tokenizer.pad_token
    assert not stop_at_end_of_turn(tokenizer)
    assert (tokenizer.eos_token, tokenizer.pad_token) == before


def test_plain_template_asks_and_ends_with_the_tokenizers_end_token(base):
    set_chat_template(base, "plain", "base")
    chat = [{"role": "user", "content": "1 + 1?"}]
    assert base.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "Question: 1 + 1?\nAnswer:"
    answered = base.apply_chat_template([*chat, {"role": "assistant", "content": "2"}], tokenize=False)
    assert answered == "Question: 1 + 1?\nAnswer: 2<|endoftext|>\n\n"
    assert end_of_turn(base) == base.eos_token_id


def test_chat_template_may_be_a_file(base, tmp_path):
    (tmp_path / "mine.jinja").write_text(PLAIN.replace("Question", "Q"))
    set_chat_template(base, str(tmp_path / "mine.jinja"), "base")
    assert "Q: x" in base.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


def test_model_without_a_template_is_refused_with_the_ways_out(base, tmp_path):
    base.chat_template = None
    with pytest.raises(RunError, match="chat_template=plain"):
        set_chat_template(base, None, "some/base")
    with pytest.raises(RunError, match="cannot be read"):
        set_chat_template(base, str(tmp_path / "nothing.jinja"), "some/base")
