"""The batches of a step: how its rollouts are divided over processes and forwards; options that are refused."""

import re
from functools import partial
from types import SimpleNamespace

import pytest

from otb.baselines.grpo import grpo
from otb.baselines.otb import otb
from otb.training.options import (
    NEUTRAL_SAMPLING,
    SCORE_NORMS,
    Batches,
    batches,
    refuse_broken_groups,
    refuse_options,
    refuse_other_sampling,
)
from otb.values import refuse_arguments


@pytest.mark.parametrize(
    ("prompts", "group_size", "processes", "rollouts_per_forward", "expected"),
    [
        (16, 4, 1, None, Batches(local=64, forward=64, accumulation=1)),
        (16, 4, 1, 8, Batches(local=64, forward=8, accumulation=8)),
        (16, 4, 8, 8, Batches(local=8, forward=8, accumulation=1)),
        (16, 4, 8, 32, Batches(local=8, forward=8, accumulation=1)),  # more than a process has
        (3, 1, 3, 1, Batches(local=1, forward=1, accumulation=1)),
    ],
)
def test_a_step_is_divided_into_processes_and_forwards(prompts, group_size, processes, rollouts_per_forward, expected):
    assert batches(prompts, group_size, processes, rollouts_per_forward) == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((3, 1, 2, None), "3 x group_size=1 = 3 rollouts do not divide over 2 processes. Try prompts_per_step=2."),
        ((1, 2, 8, None), "1 x group_size=2 = 2 rollouts do not divide over 8 processes. Try prompts_per_step=4."),
        ((16, 4, 1, 5), "rollouts_per_forward=5 must divide the 64 rollouts of a process. Try model.rollouts_per_fo"),
        ((16, 4, 1, 0), "rollouts_per_forward=0 must divide the 64 rollouts of a process. Try model.rollouts_per_fo"),
        ((16, 4, 1, 2.0), "rollouts_per_forward=2.0 must divide the 64 rollouts"),
        ((16, 4, 1, True), "rollouts_per_forward=True must divide the 64 rollouts"),
    ],
)
def test_a_division_with_a_rest_is_refused_with_one_that_has_none(arguments, said):
    with pytest.raises(ValueError) as refused:
        batches(*arguments)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("divided", "processes", "said"),
    [
        (Batches(64, 64, 1), 1, "a step has 1 of 64 rollouts in groups of 4. Try model.rollouts_per_forward=32."),
        (Batches(64, 2, 32), 1, "a step has 32 of 2 rollouts in groups of 4. Try model.rollouts_per_forward=32."),
        (Batches(4, 4, 1), 1, "a step has 1 of 4 rollouts in groups of 4. Try prompts_per_step=4."),
    ],
)
def test_micro_batches_that_break_prompt_groups_are_refused(divided, processes, said):
    with pytest.raises(ValueError) as refused:
        refuse_broken_groups(divided, 4, processes)
    assert said in str(refused.value)


def test_two_micro_batches_of_whole_groups_pass_on_one_process_or_on_two():
    refuse_broken_groups(Batches(64, 32, 2), 4, 1)
    refuse_broken_groups(Batches(64, 64, 1), 4, 2)


def test_a_caller_may_name_its_own_fix():
    with pytest.raises(ValueError, match="groups of 4. Set this."):
        refuse_broken_groups(Batches(64, 64, 1), 4, 1, fix="Set this.")


# ---- options under which tokens are not drawn from the softmax


def sampling(generation_kwargs=None, **options) -> SimpleNamespace:
    return SimpleNamespace(**(NEUTRAL_SAMPLING | {"generation_kwargs": generation_kwargs} | options))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (sampling({"presence_penalty": 0.5}), "presence_penalty=0.5 in generation_kwargs"),
        (sampling({"frequency_penalty": -0.5}), "frequency_penalty=-0.5 in generation_kwargs"),
        (sampling({"logit_bias": {7: 2.0}}), "logit_bias={7: 2.0} in generation_kwargs"),
        (sampling({"min_tokens": 8}), "min_tokens=8 in generation_kwargs"),
        (sampling({"allowed_token_ids": [1]}), "allowed_token_ids=[1] in generation_kwargs"),
        (sampling({"bad_words": ["no"]}), "bad_words=['no'] in generation_kwargs"),
        (sampling({"structured_outputs": {"regex": "a"}}), "structured_outputs={'regex': 'a'} in generation_kwargs"),
        (sampling(vllm_structured_outputs_regex="a+"), "vllm_structured_outputs_regex=a+: the score norms"),
        (sampling(top_k=-1), "top_k=-1: the score norms"),  # transformers knows no such number
        (sampling(min_p=0.1), "min_p=0.1: the score norms"),
    ],
)
def test_what_changes_the_distribution_that_is_sampled_from_is_refused(args, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        refuse_other_sampling(args, SCORE_NORMS)


@pytest.mark.parametrize(
    ("baseline", "said"),
    [
        (partial(otb, tail="cary"), "tail=cary is not one of zero, own, carry. Try tail=zero."),
        (partial(otb, tails="own"), "tails=own is not an argument of otb, which takes: tail, eps."),
        (partial(partial(otb, tails="own"), tail="own"), "tails=own is not an argument of otb, which takes: "),
        (partial(grpo, epz=1e-6), "epz=1e-06 is not an argument of grpo, which takes: "),
    ],
)
def test_arguments_that_a_baseline_does_not_take_are_refused_before_the_model_loads(baseline, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        refuse_options(SimpleNamespace(), baseline, needs_score_norms=True)


class Scaled:
    """A baseline that is an object."""

    def __call__(self, rollouts, by="reward"):
        return rollouts


Scaled.__call__.__annotations__["by"] = "Literal['reward'] | NameOfItsModule"


@pytest.mark.parametrize(
    "baseline", [otb, Scaled(), partial(Scaled(), by="reward"), partial(max, key=None), partial(partial(otb), eps=1e-6)]
)
def test_whatever_may_be_called_like_a_baseline_is_taken(baseline):
    refuse_arguments(baseline)
    with pytest.raises(ValueError, match="bye=1 is not an argument of Scaled, which takes: by."):
        refuse_arguments(partial(Scaled(), bye=1))


@pytest.mark.parametrize(
    "args",
    [
        sampling(min_p=0.0),
        sampling(min_p=None),
        sampling(top_k=-1, use_vllm=True),
        sampling({"top_k": -1}, use_vllm=True),
        sampling({"presence_penalty": 0.0, "min_tokens": 0, "logit_bias": None, "stop_token_ids": [2]}),
    ],
)
def test_values_that_change_nothing_are_taken(args):
    refuse_other_sampling(args, SCORE_NORMS)
