"""Chooses a policy's chat template and the token that ends a turn.

The end token of a base model is often not the token that ends a turn in its chat template (Qwen2.5-7B: `<|endoftext|>`
and `<|im_end|>`). Sampling that stops only at the end token runs past the end of a turn: the policy then invents the
user's next question, and never calls a tool. `describe_policy` (models.py) calls this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from otb.errors import RunError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# For base models without a template: the most common form of question-answer text in their training data.
PLAIN = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{ ' ' + message['content'] + eos_token + '\\n\\n' }}"
    "{%- elif message['role'] == 'user' -%}{{ 'Question: ' + message['content'] + '\\nAnswer:' }}"
    "{%- else -%}{{ message['content'] + '\\n\\n' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
)
MARK = "content7391"  # occurs in no template


def set_chat_template(tokenizer: PreTrainedTokenizerBase, template: str | None, name: str) -> None:
    """Gives the tokenizer the chat template that `model.chat_template` names.

    template: "plain" for `PLAIN`, the path of a jinja file, or None for the tokenizer's own. name: the model's, for
    error messages. Raises RunError if the file cannot be read, or if there is no template at all.
    """
    if template == "plain":
        begins = tokenizer.bos_token_id is not None and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
        # rendered templates are tokenized without the token that this tokenizer puts before other texts
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
            f"model.name={name} has a tokenizer without a chat template, but prompts here are chat messages. Use "
            "model.chat_template=plain (Question: ... Answer: ...), model.chat_template=FILE, or the instruct variant."
        )


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the id of the token that ends an assistant's turn in the chat template; None if there is none."""
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": MARK}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except (TemplateError, ValueError):  # the template requires more turns or other roles
        return None
    behind = text.rpartition(MARK)[2].lstrip()
    ends = [(token, number) for token, number in tokenizer.get_added_vocab().items() if behind.startswith(token)]
    return max(ends, key=lambda end: len(end[0]))[1] if ends else None


def stop_at_end_of_turn(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Makes the token that ends a turn the tokenizer's end token, and returns whether this changed it.

    TRL stops at the tokenizer's end token and at all end tokens of the model's generation configuration, so the model's
    own end token still ends a rollout. A tokenizer without a padding token keeps padding with its old end token.
    """
    end = end_of_turn(tokenizer)
    if end is None or end == tokenizer.eos_token_id:
        return False
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    return True
