"""Tests the batches of a step, and refused arguments of a baseline."""

import re
from functools import partial

import pytest

from experiments.running.grpo_options import RunOptions
from otb.baselines.grpo import grpo
from otb.baselines.otb import otb
from otb.refusals import Options
from otb.training.options import Batches, batches, refuse
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


def noisy(forward, accumulation, processes=1, kind=Options):
    """Returns options for a measurement of gradient noise in groups of 4."""
    return kind(
        measure_gradient_noise=True,
        num_generations=4,
        per_device_train_batch_size=forward,
        gradient_accumulation_steps=accumulation,
        world_size=processes,
        baseline=otb,
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            noisy(64, 1, kind=RunOptions),
            "has 1 of 64 rollouts in groups of 4. Use model.rollouts_per_forward=32.",
        ),
        (
            noisy(2, 32, kind=RunOptions),
            "has 32 of 2 rollouts in groups of 4. Use model.rollouts_per_forward=32.",
        ),
        (noisy(4, 1, kind=RunOptions), "a step has 1 of 4 rollouts in groups of 4. Use prompts_per_step=4."),
        (noisy(64, 1), "Use per_device_train_batch_size=32 and gradient_accumulation_steps=2."),
        (noisy(2, 32), "Use per_device_train_batch_size=32 and gradient_accumulation_steps=2."),
        (noisy(4, 1), "Use per_device_train_batch_size=4 and gradient_accumulation_steps=2."),
    ],
)
def test_micro_batches_that_break_prompt_groups_are_refused_with_ones_that_do_not(options, said):
    with pytest.raises(ValueError, match="compares micro-batches of whole prompt groups") as refused:
        refuse(options)
    assert said in str(refused.value)


def test_two_micro_batches_of_whole_groups_pass_on_one_process_or_on_two():
    refuse(noisy(32, 2))
    refuse(noisy(4, 2))
    refuse(noisy(64, 1, processes=2))


# ---- what may be called like a baseline


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
        refuse(Options(baseline=baseline))


class Scaled:
    """Is a baseline that is an object."""

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
