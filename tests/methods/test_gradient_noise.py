"""Tests the noise estimator and its hooks by themselves, and the trainer against gradients of single groups."""

import copy

import pytest
import torch
from peft import LoraConfig

from otb import OTBTrainer
from otb.baselines.grpo import grpo
from otb.baselines.otb import otb
from otb.baselines.otb_exact import otb_exact
from otb.methods.gradient_noise import BackwardNorms, noise_and_signal, whole_groups
from tests.support import trainers
from tests.support.trainers import group_gradients


def test_noise_and_signal_are_unbiased():
    """8 groups in micro-batches of 2 have mean (1, 2, 0) and covariance diag(1, 4, 9): noise 14, signal 5."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(20_000, 8, 3, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 2.0, 3.0])
    draws = draws + torch.tensor([1.0, 2.0, 0.0])
    small = draws.unflatten(1, (4, 2)).mean(2).square().sum(-1).mean(1)
    large = draws.mean(1).square().sum(-1)
    noise, signal = noise_and_signal(small, large, 2, 8)
    assert noise.mean() == pytest.approx(14, abs=float(4 * noise.std() / 20_000**0.5))
    assert signal.mean() == pytest.approx(5, abs=float(4 * signal.std() / 20_000**0.5))
    assert signal.min() < 0


def test_hooks_see_what_one_backward_adds_and_only_after_start():
    layer = torch.nn.Linear(3, 2)
    norms = BackwardNorms(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    for scale in (1.0, 2.0):
        norms.start(torch.device("cpu"))
        (scale * (layer(torch.ones(1, 3)) + layer(torch.ones(1, 3)))).sum().backward()
        # each of 6 weights and 2 biases has gradient 2 scale: the layer is used twice
        assert norms.take() == pytest.approx(8 * (2 * scale) ** 2)


def test_rows_are_put_back_in_their_order():
    batches = [
        {"x": torch.tensor([30, 10]), "y": ["c", "a"], "n": 5},
        {"x": torch.tensor([0, 20]), "y": ["-", "b"], "n": 5},
    ]
    back = whole_groups(batches, torch.tensor([3, 1, 0, 2]))
    assert [batch["x"].tolist() for batch in back] == [[0, 10], [20, 30]]
    assert [batch["y"] for batch in back] == [["-", "a"], ["b", "c"]] and back[1]["n"] == 5


class Literal(OTBTrainer):
    """Keeps the gradient of every prompt group, computed separately before the weights change."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.gradients = getattr(self, "gradients", []) + [group_gradients(self, output).double()]
        return output


def trained(tmp_path, model, tokenizer, kind=Literal, baseline=otb, peft_config=None, **options):
    usual = dict(per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=2, measure_gradient_noise=True)
    given = {"peft_config": peft_config}
    return trainers.trained(kind, tmp_path, model, tokenizer, baseline=baseline, given=given, **(usual | options))


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(baseline=grpo),
        dict(baseline=otb_exact),  # its backward passes run the same hooks
        dict(max_grad_norm=0.0, temperature=0.7),
        dict(max_grad_norm=1e-6),
        dict(per_device_train_batch_size=8, gradient_accumulation_steps=2, num_generations=2),
        dict(peft_config=LoraConfig(target_modules="all-linear", r=4)),
    ],
    ids=lambda options: "-".join(map(str, options)) or "defaults",
)
def test_measured_noise_is_that_of_the_gradients_of_single_groups(tmp_path, untrained, tokenizer, options):
    trainer = trained(tmp_path, untrained, tokenizer, **options)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 2
    per_batch = trainer.args.per_device_train_batch_size // trainer.num_generations
    for row, gradients in zip(rows, trainer.gradients, strict=True):
        if per_batch == 1:  # the sample covariance of the groups' gradients
            noise = (gradients - gradients.mean(0)).square().sum() / (len(gradients) - 1)
            signal = gradients.mean(0).square().sum() - noise / len(gradients)
        else:
            small = gradients.unflatten(0, (-1, per_batch)).mean(1).square().sum(1).mean()
            large = gradients.mean(0).square().sum()
            noise, signal = noise_and_signal(small, large, per_batch, len(gradients))
        assert row["gradient_noise"] == pytest.approx(float(noise), rel=1e-3)
        assert row["gradient_signal"] == pytest.approx(float(signal), rel=1e-3, abs=1e-3 * float(noise))
        assert row["verl_noise"] == pytest.approx((row["verl_power"] - row["grad_norm"] ** 2) / 15)


def test_verl_power_is_the_power_where_a_rollout_has_one_advantage_and_not_where_many(tmp_path, untrained, tokenizer):
    for baseline, equal in ((grpo, True), (otb, False)):
        row = trained(tmp_path, copy.deepcopy(untrained), tokenizer, OTBTrainer, baseline).state.log_history[0]
        assert (row["verl_power"] == pytest.approx(row["total_power"])) == equal


def test_measuring_changes_training_by_rounding_only(tmp_path, untrained, tokenizer):
    def weights(**options):
        trainer = trained(tmp_path, copy.deepcopy(untrained), tokenizer, OTBTrainer, **options)
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    # one step only: sums are reordered, and Adam turns the rounding of a gradient near 0 into a full step
    options = dict(max_steps=1, optim="sgd", learning_rate=1.0)
    torch.testing.assert_close(
        weights(**options), weights(measure_gradient_noise=False, **options), atol=1e-6, rtol=1e-5
    )
