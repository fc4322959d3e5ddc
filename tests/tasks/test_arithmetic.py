"""Tests the arithmetic task: disjoint sets, a reward that junk cannot break, demonstrations that ramble."""

from __future__ import annotations

import re
from statistics import mean, pstdev

import pytest

from experiments.running.build import build
from otb.policies.tiny_policy import build_tokenizer
from otb.tasks.arithmetic import Arithmetic, boxed_integer, running_totals
from tests.support.recipes import composed


def says(*contents) -> list[dict]:
    return [{"role": "assistant", "content": content} for content in contents]


def test_datasets_follow_from_the_seed_and_carry_the_right_answers():
    task = Arithmetic(train_prompts=50, eval_prompts=20)
    rows = task.train_dataset().to_list()
    assert (len(rows), len(task.eval_dataset())) == (50, 20)
    other = Arithmetic(train_prompts=50, seed=1).train_dataset().to_list()
    assert rows != other
    assert all(int(row["answer"]) == eval(row["prompt"][0]["content"]) for row in rows)


def test_running_totals_go_from_left_to_right():
    assert running_totals("7+8-3") == [7, 15, 12]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (says("7+8=15, \\boxed{15}"), 1.0),
        (says("\\boxed{ +15 }"), 1.0),
        (says("\\boxed{14} no \\boxed{15}"), 1.0),  # the last box counts
        (says("\\boxed{15} no \\boxed{14}"), 0.0),
        (says("\\boxed{15}", "hmm"), 0.0),  # the last assistant message counts
        (says("\\boxed{14}", "\\boxed{15}"), 1.0),
        ([*says("call"), {"role": "tool", "content": "\\boxed{15}"}], 0.0),
        ([{"role": "user", "content": "\\boxed{15}"}], 0.0),
        (says("15"), 0.0),
        (says("\\boxed{15"), 0.0),
        (says("\\boxed{1 5}"), 0.0),
        (says("\\boxed{--15}"), 0.0),
        (says("\\boxed{15.0}"), 0.0),
        (says("\\boxed{１５}"), 0.0),
        (says("\\boxed{" + "9" * 10_000 + "}"), 0.0),
        (says("\\boxed{}"), 0.0),
        (says(""), 0.0),
        (says(None), 0.0),
        (says([{"type": "text", "text": "\\boxed{15}"}]), 0.0),
        ([], 0.0),
        ([{}], 0.0),
        (["\\boxed{15}"], 0.0),
        ("\\boxed{15}", 0.0),
        (None, 0.0),
    ],
)
def test_reward_is_one_for_the_right_box_and_zero_for_all_else(completion, reward):
    assert Arithmetic().reward([completion], ["15"], trainer_state=None) == [reward]


def test_a_negative_answer_is_read():
    assert boxed_integer(says("\\boxed{-3}")) == -3


def test_wrong_demonstrations_ramble_and_all_fit_the_length_limit_but_a_few():
    task, tokenizer = Arithmetic(), build_tokenizer()
    chats = task.demonstrations(seed=0, n=1000)
    right = task.reward([chat[1:] for chat in chats], [str(running_totals(c[0]["content"])[-1]) for c in chats])
    tokens = [len(tokenizer(chat[1]["content"])["input_ids"]) + 1 for chat in chats]
    by_reward = {r: [n for n, got in zip(tokens, right, strict=True) if got == r] for r in (0.0, 1.0)}
    assert mean(by_reward[0.0]) > 2 * mean(by_reward[1.0])
    assert pstdev(tokens) > mean(tokens) / 3
    assert mean(n > task.max_completion_length for n in tokens) < 0.1


@pytest.mark.parametrize("task", ["arithmetic", "arithmetic_tools"])
def test_models_other_than_the_tiny_one_are_told_what_a_sum_asks_for(task):
    """Prompts of the tiny policy are bare sums; a run and its evaluation agree."""
    tasks = {
        (model, command): build(composed(f"model={model}", f"task={task}", command=command), "task")
        for model in ("tiny", "smollm2-135m")
        for command in ("config", "evaluate", "variance")
    }
    none = build(composed("model=smollm2-135m", f"task={task}", "task.instruction=null"), "task")
    tiny, told = tasks["tiny", "config"], tasks["smollm2-135m", "config"]
    assert tiny == tasks["tiny", "evaluate"] == none and told == tasks["smollm2-135m", "evaluate"]
    assert tiny == tasks["tiny", "variance"] and told == tasks["smollm2-135m", "variance"]
    pairs = list(zip(tiny.eval_dataset(), told.eval_dataset(), strict=True))
    assert all(re.fullmatch(r"\d([+-]\d){2,3}", bare["prompt"][-1]["content"]) for bare, _ in pairs)
    for bare, with_instruction in pairs:
        (message,), (longer,) = bare["prompt"], with_instruction["prompt"]
        assert longer["content"] == f"{message['content']}\n\n{told.instruction}"
        assert bare["answer"] == with_instruction["answer"]
    assert told.instruction.endswith("put the total into \\boxed{}.")
    (bare,), (longer,) = tiny.demonstrations(0, 1), told.demonstrations(0, 1)
    assert [message for message in bare if message["role"] != "user"] == [m for m in longer if m["role"] != "user"]
    assert [m["content"] for m in longer if m["role"] == "user"][0].endswith(told.instruction)


@pytest.mark.parametrize("key", ["train_prompts", "eval_prompts"])
@pytest.mark.parametrize("count", [0, 100_000])
def test_impossible_sizes_are_refused_by_name(key, count):
    with pytest.raises(ValueError, match=f"{key}={count}"):
        Arithmetic(**{key: count})
