"""Tests length-triggered decay: known vectors, its trigger, its state in a checkpoint, and options that exclude it."""

import copy
import functools
import io
import re

import pytest
import torch

from experiments.checks import check
from experiments.checks.methods import checked_methods
from experiments.running.grpo_options import machine_options
from experiments.running.identity import difference
from otb import OTBTrainer
from otb.baselines.otb import otb
from otb.baselines.rloo import rloo
from otb.errors import RunError
from otb.methods.schedules import LengthTriggeredDecay
from tests.support import trainers
from tests.support.recipes import composed
from tests.support.trainers import byte_reward, config, dataset


def seen(schedule: LengthTriggeredDecay, lengths, first: int = 0) -> LengthTriggeredDecay:
    for step, length in enumerate(lengths, first):
        schedule.observe(step, length)
    return schedule


def decays(schedule: LengthTriggeredDecay, steps: int = 1000) -> dict[int, float]:
    """Returns step -> factor of the learning rate from this step on, after the warm-up of 10."""
    factors = [schedule(step) for step in range(steps)]
    return {step: factors[step] for step in range(10, steps) if factors[step] != factors[step - 1]}


SURGE = [1000.0] * 110 + [3500.0] * 20  # above 3 times 1000 at step 110


@pytest.mark.parametrize(
    ("anchor", "first"),
    [("start", 208), ("surge", 308)],  # 10 + 198, 110 + 198
)
def test_length_that_goes_from_1000_to_3500_at_step_110_halves_the_rate_every_198_steps(anchor, first):
    schedule = seen(LengthTriggeredDecay(anchor=anchor), SURGE)
    assert (schedule.baseline, schedule.surge_step, schedule.period) == (1000.0, 110, 198)  # int(1.8 x 110)
    # the fourth decay would leave 1 / 16, and the floor is 1 / 10
    assert decays(schedule) == {first: 0.5, first + 198: 0.25, first + 396: 0.125, first + 594: 0.1}


def test_warm_up_rises_in_equal_parts_and_a_flat_length_changes_nothing_after_it():
    schedule = seen(LengthTriggeredDecay(warmup=4), [1000.0] * 300)
    assert [schedule(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert schedule.surge_step is None and decays(schedule) == {}
    assert LengthTriggeredDecay(warmup=0)(0) == 1.0


def test_an_outlier_among_the_first_batches_does_not_fire():
    schedule = seen(LengthTriggeredDecay(baseline_steps=4), [100.0, 100.0, 900.0, 100.0])
    assert (schedule.baseline, schedule.surge_step) == (300.0, None)  # the mean of the four
    assert seen(schedule, [900.0], first=4).surge_step is None  # 3 times 300, and not above
    assert seen(schedule, [901.0, 100.0, 5000.0], first=5).surge_step == 5  # fires once


def test_a_fixed_period_waits_for_no_surge_unless_it_is_counted_from_one():
    assert decays(LengthTriggeredDecay(fixed_period=300)) == {310: 0.5, 610: 0.25, 910: 0.125}
    from_surge = LengthTriggeredDecay(fixed_period=300, anchor="surge")
    assert decays(from_surge) == {}
    assert decays(seen(from_surge, SURGE)) == {410: 0.5, 710: 0.25}


def scheduled(schedule: LengthTriggeredDecay) -> torch.optim.lr_scheduler.LambdaLR:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]  # with and without weight decay
    return torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(groups, lr=1.0), schedule)


def stepped(scheduler, lengths, first: int) -> list[float]:
    """Returns the learning rates of the first steps."""
    rates = []
    for step, length in enumerate(lengths, first):
        scheduler.lr_lambdas[0].observe(step, length)
        rates.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("kept_at", [30, 110, 150])
def test_state_that_a_checkpoint_keeps_gives_the_same_tail(kept_at):
    """The state is saved before the baseline is complete, at the surge, and after it."""
    lengths = SURGE + [3500.0] * 300
    whole = stepped(scheduled(LengthTriggeredDecay()), lengths, 0)
    first = scheduled(LengthTriggeredDecay())
    assert stepped(first, lengths[:kept_at], 0) == whole[:kept_at]
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed = scheduled(LengthTriggeredDecay())
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert stepped(resumed, lengths[kept_at:], kept_at) == whole[kept_at:]
    assert len(set(whole[10:])) == 3  # 1, 1/2 from 208, 1/4 from 406


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(warmup=-1), "warmup=-1 must be a whole number >= 0"),
        (dict(ratio=1.0), "ratio=1.0 must be a number > 1"),
        (dict(baseline_steps=2.5), "baseline_steps=2.5 must be a whole number >= 1. Try baseline_steps=50"),
        (dict(factor=None), "factor=None must be a number between 0 and 1"),
        (dict(ratio="3"), "ratio=3 must be a number > 1"),
        (dict(baseline_steps=0), "baseline_steps=0 must be a whole number >= 1"),
        (dict(period_factor=0.0), "period_factor=0.0 must be a positive number"),
        (dict(factor=1.0), "factor=1.0 must be a number between 0 and 1"),
        (dict(floor=1.5), "floor=1.5 must be a number from 0 to 1"),
        (dict(fixed_period=0), "fixed_period=0 must be a whole number >= 1, or null"),
        (dict(anchor="end"), "anchor=end is not one of start, surge. Try anchor=start"),
    ],
)
def test_values_out_of_range_are_refused(options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        LengthTriggeredDecay(**options)


REFUSED = {  # overrides beside schedule=length_triggered -> what the message says
    "schedule.ratio=0.5": ("schedule.ratio=0.5", "must be a number > 1"),
    "schedule.anchor=end": ("schedule.anchor=end", "not one of start, surge"),
    "schedule.warmup=2.5": ("schedule.warmup=2.5", "must be a whole number"),
    "++trainer.warmup_steps=5": ("trainer.warmup_steps=5", "would both set", "schedule.warmup is its own"),
    "++schedule.ration=2": ("schedule.ration is no argument", "Did you mean ratio?"),
    "schedule.ratio=64": ("schedule.ratio=64", "task.max_completion_length=64", "Use a smaller schedule.ratio"),
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_cannot_go_with_the_schedule_is_refused_before_a_model_loads(overrides):
    with pytest.raises(RunError) as refusal:
        check(composed("schedule=length_triggered", overrides))
    assert all(part in str(refusal.value) for part in REFUSED[overrides]), refusal.value


def test_an_option_without_its_choice_is_refused():
    with pytest.raises(RunError, match=r"schedule.ratio=2 is set.*Add schedule=length_triggered"):
        check(composed("++schedule.ratio=2"))


def test_what_goes_with_the_schedule_is_taken():
    check(composed("schedule=length_triggered"))
    check(composed("schedule=length_triggered", "schedule.ratio=64", "schedule.fixed_period=20"))
    check(composed("trainer.lr_scheduler_type=cosine"))  # with schedule=constant it is the trainer's
    (built,) = checked_methods(composed("schedule=length_triggered", "schedule.ratio=2")).values()
    assert (built.ratio, built.period_factor, built.anchor) == (2, 1.8, "start")


def test_off_the_trainer_is_built_of_the_arguments_that_it_was_built_of_before():
    """A configuration group that is off passes nothing to the trainer, so older run directories are the same runs."""
    cfg = composed()
    assert checked_methods(cfg) == {} and "sampler_dtype" not in machine_options(cfg)
    new = {"schedule": {"_target_": None}, "rollouts_by": {"name": "hf"}, "seed": 0}
    assert difference({"seed": 0}, new) == []
    assert difference(new, new | {"schedule": {"_target_": "otb.methods.schedules.LengthTriggeredDecay"}}) != []


def trained(folder, model, tokenizer, schedule, baseline=rloo, **options) -> OTBTrainer:
    given = {"lr_schedule": schedule}
    return trainers.trained(OTBTrainer, folder, model, tokenizer, baseline=baseline, given=given, **options)


def rates(trainer) -> list[float]:
    return [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]


@pytest.mark.filterwarnings("ignore:responses begin with")
@pytest.mark.parametrize("baseline", [rloo, otb], ids=["rloo", "otb"])
def test_trainer_feeds_the_schedule_the_mean_own_length_of_each_batch(tmp_path, untrained, tokenizer, baseline):
    """Responses cannot triple here, so a ratio just above 1 lets the batch after the first two fire."""

    class Eager(LengthTriggeredDecay):
        def observe(self, step, mean_length):
            super().observe(step, mean_length if step < 2 else 10 * mean_length)

    schedule = Eager(warmup=0, baseline_steps=2, period_factor=0.5)
    trainer = trained(tmp_path, untrained, tokenizer, schedule, baseline, max_steps=5)
    rows = trainer.state.log_history[:5]
    assert trainer.lr_schedule.lengths == [row["response_length_mean"] for row in rows[:2]]
    assert (trainer.lr_schedule.surge_step, trainer.lr_schedule.period) == (2, 1)
    # 1e-3 until the surge in the third step; the next steps are 3 and 4 periods from the start: 1/8, then the floor
    assert rates(trainer) == pytest.approx([1e-3, 1e-3, 1e-3, 1.25e-4, 1e-4])
    assert [row.get("length_surge_step") for row in rows] == [None, None, 2, 2, 2]
    assert rows[1]["length_baseline"] == pytest.approx(sum(trainer.lr_schedule.lengths) / 2)
    assert schedule.lengths == [], "the trainer has a copy of its own"


def test_schedule_that_never_fires_trains_as_none_does(tmp_path, untrained, tokenizer):
    twin = copy.deepcopy(untrained)
    with_it = trained(tmp_path / "with", untrained, tokenizer, LengthTriggeredDecay(warmup=0), max_steps=3)
    without = trained(tmp_path / "without", twin, tokenizer, None, max_steps=3)
    for mine, other in zip(with_it.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_trainer_refuses_a_second_schedule_and_says_when_no_surge_can_be_seen(tmp_path, untrained, tokenizer):
    optimizer = torch.optim.SGD(untrained.parameters(), lr=1.0)
    pair = (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    make = functools.partial(OTBTrainer, untrained, byte_reward, config(tmp_path), dataset(), optimizers=pair)
    with pytest.raises(ValueError, match=r"optimizers=\(..., ConstantLR\) and lr_schedule would both"):
        make(processing_class=tokenizer, lr_schedule=LengthTriggeredDecay())
    with pytest.warns(UserWarning, match="max_completion_length=12: no surge can be seen"):
        trained(tmp_path, untrained, tokenizer, LengthTriggeredDecay(baseline_steps=1, ratio=12.5), max_steps=1)
