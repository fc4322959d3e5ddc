"""Chooses the chat template of a policy, and the token with which it ends a turn.

A base model's end token is often not the one with which its chat template ends a turn (Qwen2.5-7B: `<|endoftext|>` and
`<|im_end|>`). Whoever samples until the end token alone never stops at the end of a turn: the policy goes on to invent
the user's next question, and no tool is ever called. `describe_policy` (models.py) calls both functions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from otb.errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# For base models without a template: the form in which most of their question-answer text comes.
PLAIN = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{ ' ' + message['content'] + eos_token + '\\n\\n' }}"
    "{%- elif message['role'] == 'user' -%}{{ 'Question: ' + message['content'] + '\\nAnswer:' }}"
    "{%- else -%}{{ message['content'] + '\\n\\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
)
MARK = "content7391"  # stands in no template


def set_chat_template(tokenizer: PreTrainedTokenizerBase, template: str | None, name: str) -> None:
    """Gives the tokenizer the chat template that `model.chat_template` names.

    template: "plain" for `PLAIN`, the path of a jinja file, or None for the tokenizer's own. name: of the model, for
    the message. Raises RunError where the file cannot be read, or where there is no template at all.
    """
    if template == "plain":
        begins = tokenizer.bos_token_id is not None and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
        # a template's text is tokenized as it is, without the token that this tokenizer puts before other texts
        tokenizer.chat_template = "{{- bos_token -}}" + PLAIN if begins else PLAIN
    elif template is not None:
        try:
            tokenizer.chat_template = Path(template).expanduser().read_text(encoding="utf8")
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(
                f"model.chat_template={template} cannot be read: {error}. Give a jinja file, plain, or null for the "
                "tokenizer's own."
            ) from error
    if tokenizer.chat_template is None:
        raise RunError(
            f"model.name={name} has a tokenizer without a chat template, and prompts here are chat messages. Use "
            "model.chat_template=plain (Question: ... Answer: ...), model.chat_template=FILE, or the instruct variant."
        )


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the id of the token with which the chat template ends an assistant's turn; None where it has none."""
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": MARK}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except (TemplateError, ValueError):  # a template that wants more than one turn, or other roles
        return None
    behind = text.rpartition(MARK)[2].lstrip()
    ends = [(token, number) for token, number in tokenizer.get_added_vocab().items() if behind.startswith(token)]
    return max(ends, key=lambda end: len(end[0]))[1] if ends else None


def stop_at_end_of_turn(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Makes the token that ends a turn the tokenizer's end token; tells whether that changed anything.

    TRL stops at the tokenizer's end token and at those of the model's generation configuration, so that the model's own
    end token still ends a rollout. Where the two were one for padding, the padding token stays what it was.
    """
    end = end_of_turn(tokenizer)
    if end is None or end == tokenizer.eos_token_id:
        return False
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    return True
