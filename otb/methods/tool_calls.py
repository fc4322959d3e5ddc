"""Reads a policy's tool calls with TRL's parser for the model's chat template. tool_rollouts.py calls it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)

from otb.errors import RunError


def check_tool_template(tokenizer, name: str) -> None:
    """Raises RunError if the chat template of the policy `name` cannot write tool calls or TRL cannot read them."""
    try:
        if not supports_tool_calling(tokenizer):
            raise ValueError("it does not render tool calls and replies.")
        if not is_chat_template_prefix_preserving(tokenizer):
            get_training_chat_template(tokenizer)
        if not getattr(tokenizer, "response_template", None):
            add_response_schema(copy.deepcopy(tokenizer))
    except ValueError as error:
        raise RunError(
            f"model.name={name} has a chat template that cannot serve a task with tools: {error} Use a model whose "
            "template TRL knows (Qwen2.5, Qwen3 and others), or a copy of its tokenizer in a local folder with a "
            "corrected chat_template and response_template."
        ) from error


def read_codes(tokenizer, turn_ids: list[int], prefix: list[int], tools: list[Callable]) -> list[str | None]:
    """Returns the program of each call of a turn, as TRL reads it; None for a malformed call.

    Call it inside `every_call_readable`. turn_ids: tokens of the turn. prefix: all tokens before it.
    """
    message = parse_response(tokenizer, turn_ids, prefix=prefix, tools=tools) if turn_ids else {}
    return [call["function"]["arguments"]["code"] for call in message.get("tool_calls") or []]


@contextmanager
def every_call_readable(tokenizer, end_tokens: Sequence[int]) -> Iterator[None]:
    """Makes the tokenizer's `parse_response`, which TRL calls, return only calls that `PythonTool.python` can answer.

    Unchanged, it raises for malformed JSON, and TRL then treats the turn as a final answer in plain text. For deeply
    nested JSON it raises RecursionError, which would end the training.
    Inside the block each turn is parsed only once, although it is needed both before its programs run and by TRL, and
    although rollouts of a prompt often begin with the same turn.
    """
    parse = tokenizer.parse_response
    messages: dict[tuple, dict] = {}

    def parse_once(ids: list[int], **options) -> dict:
        turn = (tuple(ids), tuple(options.get("prefix", ())))
        if turn not in messages:
            messages[turn] = parse_anew(ids, **options)
        return copy.deepcopy(messages[turn])  # TRL changes what it is given

    def parse_anew(ids: list[int], **options) -> dict:
        try:
            message = parse(ids, **options)
            codes = [code_of(call) for call in message.get("tool_calls") or []]
        except Exception:  # a policy can write anything, so a parser can raise anything
            message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
            # An unreadable message that is complete holds a malformed call; an incomplete one was cut by the budget.
            codes = [None] if ids[-1] in end_tokens else []
        calls = [{"type": "function", "function": {"name": "python", "arguments": {"code": code}}} for code in codes]
        return message | ({"tool_calls": calls} if calls else {})

    tokenizer.parse_response = parse_once
    try:
        yield
    finally:
        del tokenizer.parse_response


def code_of(call: dict) -> str | None:
    """Returns the program of a parsed tool call; None unless it calls `python` with a program as its only argument."""
    function = call.get("function")
    if not isinstance(function, dict) or function.get("name") != "python":
        return None
    arguments = function.get("arguments")
    if not isinstance(arguments, dict) or arguments.keys() != {"code"}:
        return None
    return arguments["code"] if isinstance(arguments["code"], str) else None
