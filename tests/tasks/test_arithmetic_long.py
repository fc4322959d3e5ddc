"""Tests the long arithmetic tasks: mistakes and repairs, lengths with a tail, replies that equal Python's."""

import re
from statistics import mean

import pytest

from experiments.running.build import build
from otb.policies.tiny_policy import build_tokenizer
from otb.tasks.arithmetic_long import ArithmeticLong, terms_of
from otb.tasks.arithmetic_long_tools import ArithmeticLongTools
from tests.support.recipes import composed

SHOWN = 600
TASKS = {"arithmetic_long": ArithmeticLong, "arithmetic_long_tools": ArithmeticLongTools}


def asked(chat: list[dict]) -> str:
    return next(message["content"] for message in chat if message["role"] == "user")


def answered(chat: list[dict]) -> list[dict]:
    return [message for message in chat if message["role"] not in ("user", "system")]


def spoken(chat: list[dict]) -> str:
    return "".join(message["content"] for message in chat if message["role"] == "assistant")


def rewards(task: ArithmeticLong, chats: list) -> list[float]:
    answers = [str(sum(digit for _, digit in terms_of(asked(chat)))) for chat in chats]
    return task.reward([answered(chat) for chat in chats], answers)


@pytest.fixture(scope="module", params=TASKS)
def task(request) -> ArithmeticLong:
    return TASKS[request.param]()


@pytest.fixture(scope="module")
def chats(task) -> list[list[dict]]:
    return task.demonstrations(seed=0, n=SHOWN)


def test_a_problem_is_letters_in_order_with_a_digit_each_and_its_answer_their_sum():
    rows = ArithmeticLong(train_prompts=50, eval_prompts=50).train_dataset()
    for row in rows:
        terms = terms_of(row["prompt"][0]["content"])
        assert "".join(letter for letter, _ in terms) == "abcdefghijklmnop"[: len(terms)]
        assert 10 <= len(terms) <= 16 and int(row["answer"]) == sum(digit for _, digit in terms)


def test_careful_demonstrations_are_nearly_all_right_and_noisy_ones_mostly(task, chats):
    careful = mean(rewards(task, task.demonstrations(seed=0, n=SHOWN, noise=0.0)))
    assert careful > 0.97 > mean(rewards(task, chats)) > 0.7


def test_responses_are_long_with_a_tail_and_nearly_all_fit(task, chats):
    encoded = build_tokenizer().apply_chat_template(chats, return_dict=True, return_assistant_tokens_mask=True)
    own = sorted(sum(mask) for mask in encoded["assistant_masks"])
    assert 150 < mean(own) < 250 and own[int(0.95 * SHOWN)] > 1.8 * own[SHOWN // 2]
    assert mean(len(ids) > task.max_completion_length + 60 for ids in encoded["input_ids"]) < 0.03


def test_a_mistake_is_mended_at_once_or_after_a_check_and_some_are_never_noticed(chats):
    texts = [spoken(chat) for chat in chats]
    at_once = mean(bool(re.search(r"no [a-p]\d", text)) for text in texts)
    redone = mean("redo" in text for text in texts)
    unchecked = mean("check" not in text for text in texts)
    assert 0.1 < at_once < 0.6 and 0.1 < redone < 0.5 and 0.05 < unchecked < 0.15


def test_checks_go_from_the_last_term_backwards_and_redone_sums_forwards_again():
    chat = next(chat for chat in ArithmeticLong().demonstrations(0, SHOWN) if spoken(chat).count("redo") >= 2)
    problem = [letter for letter, _ in terms_of(asked(chat))]
    passes = re.split(r"first |check |redo ", spoken(chat))[1:]
    for number, text in enumerate(passes):
        letters = list(dict.fromkeys(re.findall(r"([a-p])\d=", text)))
        assert letters == (problem[::-1] if number % 2 else problem)


def test_python_replies_to_a_demonstrated_call_what_python_would():
    chats = ArithmeticLongTools().demonstrations(0, SHOWN)
    calls = 0
    for chat in chats:
        for call, reply in zip(chat, chat[1:], strict=False):
            if "tool_calls" in call:
                code = call["tool_calls"][0]["function"]["arguments"]["code"]
                assert reply == {"role": "tool", "name": "python", "content": str(eval(code.removeprefix("print")))}
                calls += 1
    assert SHOWN / 2 < calls < 3 * SHOWN
    most = max(sum("tool_calls" in message for message in chat) for chat in chats)
    assert most == ArithmeticLongTools().max_turns - 2  # leaves a turn for the answer


@pytest.mark.parametrize("name", TASKS)
def test_models_other_than_the_tiny_one_are_told_what_the_letters_ask_for(name):
    tiny, other = (build(composed(f"model={model}", f"task={name}"), "task") for model in ("tiny", "hub"))
    bare, told = (task.eval_dataset()[0]["prompt"][-1]["content"] for task in (tiny, other))
    assert told == f"{bare}\n\n{other.instruction}"
