"""Tests methods by themselves, with a stand-in for the trainer and without TRL or a model."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from experiments.running.kept_rollouts import FiniteCheck
from otb.errors import RunError
from otb.methods import Method, Step
from otb.methods.gradient_noise import GradientNoise
from otb.methods.mismatch import SamplerMismatch
from otb.methods.schedules import FollowedLengths, LengthTriggeredDecay
from otb.methods.token_weights import TokenWeights, WeightedAdvantages
from otb.rollouts import OwnTokens, RolloutGroups
from tests.support.commands import ROOT


class Accelerator:
    """Stands in for accelerate with a single process."""

    device, num_processes, process_index, is_main_process = torch.device("cpu"), 1, 0, True

    def gather(self, rows):
        return rows

    def unwrap_model(self, model):
        return model


class Trainer:
    """Offers what a method needs of the trainer; `recorded` keeps the metrics."""

    def __init__(self, model=None, **args):
        self.accelerator, self.model, self.args = Accelerator(), model, SimpleNamespace(**args)
        self.state, self.recorded = SimpleNamespace(global_step=4), {}
        self._metrics, self.num_generations, self.max_completion_length = {"train": {}}, 2, 100

    def record(self, metrics, mode="train"):
        self.recorded |= metrics

    def gathered(self, rows):
        return rows.unflatten(0, (-1, self.num_generations))

    def refuse_sharding(self, option, instead):
        pass


def attached(method: Method, **options) -> tuple[Method, Trainer]:
    trainer = Trainer(**options)
    method.attach(trainer)
    return method, trainer


def test_methods_without_a_head_or_tools_import_no_trl():
    names = ("gradient_noise", "improvement_update", "mismatch", "sampler_copy", "schedules", "token_weights")
    code = "import sys; " + "; ".join(f"import otb.methods.{name}" for name in names) + "; print('trl' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_hooks_do_nothing_by_default():
    method, _ = attached(Method())
    inputs, loss, norm = {"a": 1}, torch.tensor(2.0), torch.tensor(3.0)
    assert method.batches([inputs]) == [inputs] and method.gradient(norm) is norm and method.learners() == {}
    assert method.around_loss(lambda model, inputs: (model, inputs), "model", inputs) == ("model", inputs)
    assert method.around_generation(lambda prompts: (prompts, 1), ["p"]) == (["p"], 1)
    assert method.allows_lean(inputs) and method.scheduler(None) is None and method.after_micro_batch(loss) is None


def test_token_weights_multiply_the_advantages_by_their_factors():
    method, trainer = attached(WeightedAdvantages(TokenWeights("surprisal")))
    mask = torch.tensor([[True, True], [True, False]])
    step = Step({}, OwnTokens(mask), factors=torch.tensor([[0.5, 1.5], [1.0, 0.0]]))
    step.rollouts = RolloutGroups(torch.tensor([[1.0, 0.0]]), torch.tensor([[2, 1]]))
    step.advantages = torch.tensor([[[2.0, 2.0], [-1.0, 0.0]]])
    method.weighed(step)
    assert step.advantages.tolist() == [[[1.0, 3.0], [-1.0, 0.0]]]
    assert trainer.recorded["token_weight_mean"] == 1.0  # (0.5 + 1.5 + 1) / 3


def test_the_schedule_is_told_the_lengths_and_a_limit_that_hides_every_surge_is_a_warning():
    method, trainer = attached(FollowedLengths(LengthTriggeredDecay(baseline_steps=1, ratio=3.0)))
    trainer._metrics["train"] = {"response_length_mean": [40.0]}
    with pytest.warns(UserWarning, match="responses begin with 40.0 tokens, and 3 times as many are not below"):
        method.finish(None)
    assert trainer.recorded["length_baseline"] == 40.0


def test_rollouts_outside_the_band_leave_the_loss_and_its_normaliser():
    method, trainer = attached(SamplerMismatch(), geometric_ratio_band=(0.9, 1.1))
    mask = torch.tensor([[1, 1], [1, 0]])
    output = {"completion_mask": mask, "old_per_token_logps": torch.tensor([[-1.0, -1.0], [-1.0, 0.0]])}
    output["sampling_per_token_logps"] = torch.tensor([[-1.3, -1.3], [-1.05, 0.0]])  # ratios exp(0.3) and exp(0.05)
    method.begin(output)
    assert output["completion_mask"].tolist() == [[0, 0], [1, 0]] and output["num_items_in_batch"] == 1
    assert trainer.recorded == {"dropped_by_mismatch": 0.5}


def test_gradient_noise_is_measured_on_what_each_backward_adds():
    """Two micro-batches, each one group of two rollouts, have gradients (6, 0) and (0, 2) over the loss's divisor 2."""
    model = torch.nn.Linear(2, 1, bias=False)
    method, trainer = attached(GradientNoise(), model=model, per_device_train_batch_size=2)
    for gradient in ((3.0, 0.0), (0.0, 1.0)):
        method.before_micro_batch()
        (model.weight * torch.tensor([gradient])).sum().backward()
        method.after_micro_batch(torch.zeros(()))
    norm = model.weight.grad.norm()
    assert method.gradient(norm) is norm
    # groups g1, g2: mean (3, 1), |mean|^2 = 10, mean |g|^2 = 20; noise = 2 (20 - 10) = 20, signal = 10 - 20 / 2 = 0
    assert trainer.recorded["gradient_noise"] == pytest.approx(20)
    assert trainer.recorded["gradient_signal"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("losses", "norm", "named"), [((1.0, float("nan")), 1.0, "loss=nan"), ((1.0,), float("inf"), "gradient_norm=inf")]
)
def test_a_value_that_is_not_finite_stops_the_run_before_the_optimizer_steps(losses, norm, named, tmp_path):
    written = []
    kept = SimpleNamespace(
        directory=SimpleNamespace(path=tmp_path),
        write=lambda name, groups: written.append(name) or tmp_path / f"{name}.parquet",
    )
    method, _ = attached(FiniteCheck(kept))
    for loss in losses:
        method.after_micro_batch(torch.tensor(loss))
    with pytest.raises(RunError, match=f"{named} at step 5; it must be finite"):
        method.gradient(torch.tensor(norm))
    assert written == ["failed-00000005"]
