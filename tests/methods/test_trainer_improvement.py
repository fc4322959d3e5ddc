"""Tests improvement updates inside real TRL training, against plain forwards and loops."""

import copy

import pytest
import torch

from otb import OTBTrainer
from otb.baselines.energy_probe import EnergyProbe
from otb.baselines.otb import otb
from otb.baselines.rloo import rloo
from otb.methods.improvement import PolicyImprovement
from otb.methods.schedules import LengthTriggeredDecay
from otb.methods.token_weights import TokenWeights
from tests.support import trainers
from tests.support.improvement_updates import (
    WatchedTrainer,
    clipped_gradient,
    own_mask,
    weights_of,
)
from tests.support.trainers import byte_reward, log_probs_of

# With plain gradient steps, the change of the weights gives the gradient; large steps make tokens clip.
SGD = dict(optim="sgd", learning_rate=3.0, max_grad_norm=0.0)
MICRO_BATCHES = dict(per_device_train_batch_size=4, gradient_accumulation_steps=4)


def trained(folder, model, tokenizer, improvement, *, kind=OTBTrainer, baseline=rloo, **options):
    methods = {name: options.pop(name) for name in ("token_weights", "lr_schedule") if name in options}
    given, plain = methods | {"improvement": improvement}, copy.deepcopy(model)  # before TRL replaces its forward
    return trainers.trained(
        kind, folder, model, tokenizer, baseline=baseline, given=given, before={"plain": plain}, **options
    )


def at(trainer, weights):
    """Returns the plain model with these weights."""
    model = trainer.plain.eval()
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    return model


@pytest.mark.parametrize(
    ("improvement", "baseline", "options"),
    [
        (PolicyImprovement(window=2, cap=3.0, negative_scale=1.0), rloo, SGD),
        (PolicyImprovement("constant", window=2, advantages="scaled"), otb, SGD | MICRO_BATCHES | dict(beta=0.05)),
        (PolicyImprovement("shuffled", window=2, cap=3.0), otb, SGD | dict(token_weights=TokenWeights("surprisal"))),
        (PolicyImprovement("constant", window=2), EnergyProbe(), SGD | dict(learning_rate=0.3)),
    ],
    ids=["pipo-rloo", "constant-otb-scaled", "shuffled-otb-surprisal", "constant-energy_probe"],
)
def test_update_is_the_clipped_gradient_on_the_batch_before(
    tmp_path, untrained, tokenizer, improvement, baseline, options
):
    """Its ratio is to the policy that sampled that batch, and it has no KL term, whatever the ordinary update has; the
    new batch keeps the log-probs from before it.
    """
    kinds = dict(kind=WatchedTrainer, baseline=baseline, max_steps=6)
    trainer = trained(tmp_path, untrained, tokenizer, improvement, **kinds, **options)
    assert improvement.state_dict()["means"] == [], "the trainer has a copy of its own"
    assert improvement.seed is None and trainer.improvement.seed == trainer.args.seed
    assert len(trainer.updates) == 6 and len([row for row in trainer.state.log_history if "loss" in row]) == 6
    twin, made = PolicyImprovement(**settings(trainer.improvement)), 0
    for kept, expected in trainer.scaled if improvement.advantages == "scaled" else ():
        torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-5)
    for number, update in enumerate(trainer.updates):
        reading = twin.observe(float(update["rewards"].mean()))
        assert {name: update["row"].get(name) for name in reading.metrics()} == pytest.approx(reading.metrics())
        if not reading.phi:
            assert torch.equal(update["after"], update["before"]) and "improvement_ratio_mean" not in update["row"]
            assert all("old_per_token_logps" not in batch for batch in update["new"]), "the ratio is exactly 1"
            continue
        made += 1
        model = at(trainer, update["before"])
        longest = trainer.max_completion_length
        expected = clipped_gradient(model, update["kept"], reading.phi, longest)
        moved = (update["before"] - update["after"]) / trainer.args.learning_rate
        torch.testing.assert_close(moved, expected, rtol=2e-3, atol=2e-5)
        assert update["row"]["improvement_gradient_norm"] == pytest.approx(float(expected.norm()), rel=1e-3)
        check_ratios(model, update)
        for kept, earlier in zip(update["kept"], trainer.updates[number - 1]["new"], strict=True):
            assert torch.equal(kept["completion_ids"], earlier["completion_ids"])
            if improvement.advantages == "native":
                assert torch.equal(kept["advantages"], earlier["advantages"])
        for batch in update["new"]:
            own = own_mask(batch)
            old = log_probs_of(model, batch, 1.0)
            torch.testing.assert_close(batch["old_per_token_logps"][own], old[own], rtol=1e-4, atol=1e-4)
    assert made == (3 if improvement.mode == "shuffled" else 4)


def settings(improvement) -> dict:
    return {name: value for name, value in vars(improvement).items() if not name.startswith("_")}


def check_ratios(model, update) -> None:
    ratios, clipped, means = [], [], []
    phi = update["row"]["improvement_phi"]
    for batch in update["kept"]:
        own = own_mask(batch)
        with torch.no_grad():
            ratio = (log_probs_of(model, batch, 1.0) - batch["old_per_token_logps"]).exp()
        advantages = batch["advantages"] if batch["advantages"].dim() == 2 else batch["advantages"].unsqueeze(1)
        a = (phi * advantages).expand(own.shape)
        outside = ((ratio < 0.8) & (a < 0)) | ((ratio > 1.2) & (a > 0))
        ratios.append(ratio[own])
        clipped.append(outside[own].float().mean())
        means.append(float(ratio[own].mean()))
    assert update["row"]["improvement_ratio_mean"] == pytest.approx(float(torch.cat(ratios).mean()), rel=1e-3)
    assert update["row"]["improvement_clip_fraction"] == pytest.approx(float(torch.stack(clipped).mean()), abs=0.02)


def test_ordinary_update_takes_its_ratio_to_the_policy_before_the_improvement_update(tmp_path, untrained, tokenizer):
    class Keeping(WatchedTrainer):
        def _get_grad_norm(self, *args, **kwargs):
            self.updates[-1]["gradient"] = torch.cat([p.grad.flatten() for p in self.model.parameters()]).clone()
            return super()._get_grad_norm(*args, **kwargs)

    improvement = PolicyImprovement("constant", window=2)
    trainer = trained(tmp_path, untrained, tokenizer, improvement, kind=Keeping, max_steps=4, **SGD)
    update = trainer.updates[-1]
    model = at(trainer, update["after"])
    expected = clipped_gradient(model, update["new"], 1.0, trainer.max_completion_length)
    torch.testing.assert_close(update["gradient"], expected, rtol=2e-3, atol=2e-5)
    old = log_probs_of(model, update["new"][0], 1.0)
    moved = (old - update["new"][0]["old_per_token_logps"])[own_mask(update["new"][0])].abs().max()
    assert moved > 1e-3, "the improvement update has moved the policy, so that a ratio of 1 would be wrong"


def logged(trainer) -> list[dict]:
    """Returns the log without times and without the metrics of improvement updates."""
    times = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "step_time"}
    return [
        {name: value for name, value in row.items() if name not in times and not name.startswith("improvement_")}
        for row in trainer.state.log_history
    ]


@pytest.mark.parametrize("baseline", [rloo, otb], ids=["rloo", "otb"])
def test_before_the_window_is_full_no_bit_changes(tmp_path, untrained, tokenizer, baseline):
    plain = trained(tmp_path, copy.deepcopy(untrained), tokenizer, None, baseline=baseline, max_steps=3)
    waiting = trained(tmp_path, untrained, tokenizer, PolicyImprovement(window=3), baseline=baseline, max_steps=3)
    assert torch.equal(weights_of(waiting), weights_of(plain)) and logged(waiting) == logged(plain)
    rows = [row for row in waiting.state.log_history if "loss" in row]
    assert [row["improvement_mu"] for row in rows] == [row["reward_mean"] for row in rows]


def test_rewards_that_are_all_equal_leave_weights_and_momentum_alone(tmp_path, untrained, tokenizer):
    """After four batches with spread comes one without; its improvement update, one step later, is left out."""
    calls = []

    def reward(completions, **columns):
        calls.append(len(completions))
        return byte_reward(completions) if len(calls) < 4 else [1.0] * len(completions)

    options = dict(kind=WatchedTrainer, reward=reward, max_steps=6)
    trainer = trained(tmp_path, untrained, tokenizer, PolicyImprovement("constant", window=2), **options)
    made = [not torch.equal(update["after"], update["before"]) for update in trainer.updates]
    assert made == [False, False, True, True, False, False]
    adam = next(iter(trainer.optimizer.optimizer.state.values()))
    assert adam["step"] == 6 + 2, "of Adam: ordinary steps and improvement updates, none for those left out"


def test_schedule_and_count_of_steps_move_once_per_step(tmp_path, untrained, tokenizer):
    """The improvement update uses the same learning rate as the ordinary update of its step."""
    options = dict(max_steps=4, lr_scheduler_type="linear", kind=WatchedTrainer) | SGD
    trainer = trained(tmp_path, untrained, tokenizer, PolicyImprovement("constant", window=2), **options)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["learning_rate"] for row in rows] == pytest.approx([3.0, 2.25, 1.5, 0.75])
    assert trainer.state.global_step == 4 and [row["step"] for row in rows] == [1, 2, 3, 4]
    update = trainer.updates[3]
    gradient = clipped_gradient(at(trainer, update["before"]), update["kept"], 0.43, 12)
    torch.testing.assert_close((update["before"] - update["after"]) / 0.75, gradient, rtol=2e-3, atol=5e-5)


def test_update_that_moves_nothing_has_ratio_1_and_leaves_every_metric_of_the_step_alone(
    tmp_path, untrained, tokenizer
):
    """The training has a learning rate of 0, gradient noise and a learning-rate schedule."""
    options = dict(learning_rate=0.0, measure_gradient_noise=True, max_steps=4, baseline=otb) | MICRO_BATCHES

    def run(improvement):
        twin, decay = copy.deepcopy(untrained), LengthTriggeredDecay(warmup=0, fixed_period=2)
        return trained(tmp_path, twin, tokenizer, improvement, lr_schedule=decay, **options)

    plain, replaying = run(None), run(PolicyImprovement("constant", window=2))
    for mine, other in zip(logged(replaying), logged(plain), strict=True):
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-5)
    rows = [row for row in replaying.state.log_history if "loss" in row]
    assert [row.get("improvement_phi") for row in rows] == [None, None, 0.43, 0.43]
    assert rows[3]["improvement_ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert rows[3]["improvement_clip_fraction"] == 0 < rows[3]["improvement_gradient_norm"]


@pytest.mark.parametrize("saved_at", [1, 3], ids=["before the window is full", "after"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, untrained, tokenizer, saved_at):
    options = dict(baseline=otb, max_steps=5) | MICRO_BATCHES
    improvement = PolicyImprovement("shuffled", window=2, cap=3.0)
    saving = options | dict(save_strategy="steps", save_steps=saved_at)
    whole = trained(tmp_path, copy.deepcopy(untrained), tokenizer, improvement, **saving)
    checkpoint = str(tmp_path / f"checkpoint-{saved_at}")
    resumed = trained(tmp_path / "on", untrained, tokenizer, improvement, resume=checkpoint, **options)
    assert torch.equal(weights_of(resumed), weights_of(whole))
    assert resumed.improvement.state_dict() == whole.improvement.state_dict()
    (tmp_path / f"checkpoint-{saved_at}" / "improvement_0.pt").unlink()
    with pytest.raises(ValueError, match="has no improvement_0.pt, .* the batch of the step before"):
        resumed._load_optimizer_and_scheduler(checkpoint)


def test_batch_of_another_number_of_processes_is_refused(tmp_path, untrained, tokenizer):
    trainer = trained(tmp_path, untrained, tokenizer, PolicyImprovement(), max_steps=1, save_strategy="steps")
    trainer._save_optimizer_and_scheduler(str(tmp_path))
    state = torch.load(tmp_path / "improvement_0.pt", weights_only=True)
    torch.save(state | {"processes": 2}, tmp_path / "improvement_0.pt")
    with pytest.raises(ValueError, match="written by 2 processes, .* and this run has 1. Resume with as many"):
        trainer._load_optimizer_and_scheduler(str(tmp_path))


def test_a_sampler_that_differs_keeps_its_importance_ratios_in_both_updates(tmp_path, untrained, tokenizer):
    options = dict(kind=WatchedTrainer, sampler_dtype="bfloat16", max_steps=4)
    trainer = trained(tmp_path, untrained, tokenizer, PolicyImprovement("constant", window=2), **options)
    kept = trainer.updates[-1]["kept"][0]
    earlier = trainer.updates[-2]["new"][0]
    assert torch.equal(kept["importance_sampling_ratio"], earlier["importance_sampling_ratio"])
    assert torch.equal(kept["old_per_token_logps"], earlier["old_per_token_logps"])
    assert not torch.equal(trainer.updates[-1]["after"], trainer.updates[-1]["before"])
