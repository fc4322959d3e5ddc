"""Tests token weights inside real TRL training against naive loops over plain forwards."""

import copy
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl import GRPOTrainer

from otb import OTBTrainer, adapters
from otb.advantages import advantages as advantages_of
from otb.baselines.energy_probe import EnergyProbe
from otb.baselines.ob_exact import ob_exact
from otb.baselines.otb import otb
from otb.baselines.rloo import rloo
from otb.loss_inputs import prompts_with_responses, response_mask
from otb.methods import Method
from otb.methods.token_weights import TokenWeights
from otb.rollouts import RolloutGroups
from otb.score_norms import log_sum_squared_probs, logit_gradient_proxy
from tests.support import trainers
from tests.support.tool_trainers import FakeSandbox, answer, call, scripted
from tests.support.trainers import KeptSteps, byte_reward, config, dataset

# A random B instead of 0 moves states from the first step on; dropout must not reach the weights.
LORA = LoraConfig(target_modules="all-linear", r=4, lora_alpha=8, lora_dropout=0.3, init_lora_weights=False)
FRESH = LoraConfig(target_modules="all-linear", r=4, lora_alpha=8)


@contextmanager
def last_layer(model):
    """Collects the last layer's output, which is the input of the final norm."""
    kept = []
    hook = model.get_base_model().model.layers[-1].register_forward_hook(lambda _, __, out: kept.append(out))
    yield kept
    hook.remove()


def forward(model, output):
    """Returns a plain forward's logits and both kinds of states (B, C, d) where they predict the response."""
    ids, attention_mask = prompts_with_responses(output)
    predicting = slice(-output["completion_ids"].shape[1] - 1, -1)
    with torch.no_grad(), last_layer(model) as kept:
        plain = model(input_ids=ids, attention_mask=attention_mask, output_hidden_states=True)
    before_norm = kept[0] if torch.is_tensor(kept[0]) else kept[0][0]
    states = {"post_norm": plain.hidden_states[-1], "pre_norm": before_norm}
    return plain.logits[:, predicting], {name: values[:, predicting] for name, values in states.items()}


def naive_factors(trainer, output, logits, states) -> list[torch.Tensor]:
    """Returns f_t of the own tokens of each row, computed in a loop."""
    weights, model = trainer.token_weights, trainer.accelerator.unwrap_model(trainer.model)
    with model.disable_adapter():
        base_logits, base_states = forward(model, output)
    log_pi, log_base = (each.div(trainer.temperature).log_softmax(-1) for each in (logits, base_logits))
    sampled = output["completion_ids"].unsqueeze(-1)
    surprisal, base_surprisal = (-each.gather(-1, sampled).squeeze(-1) for each in (log_pi, log_base))
    entropies = -(log_pi.exp() * log_pi).sum(-1)
    factors = []
    for row, own in enumerate(response_mask(output)):
        entropy = torch.cat([entropies[row][own], entropies[row][own][-1:]])
        signal = {
            "arca": (states[weights.states][row] - base_states[weights.states][row]).norm(dim=-1)[own],
            "surprisal": surprisal[row][own],
            "divergence": (surprisal[row] - base_surprisal[row]).abs()[own],
            "entropy_reduction": (entropy[:-1] - entropy[1:]).clamp(min=0),
        }[weights.signal]
        raw = (signal + weights.eps) ** weights.power
        if weights.normalise == "trajectory":
            factors.append(raw / raw.mean())
        else:
            factors.append(raw * weights._count / weights._sum if weights._sum else torch.ones_like(raw))
    return factors


class Checking(OTBTrainer):
    """Keeps the factors from naive loops, and the advantages that follow from them, before the weights change."""

    def _replace_advantages(self, output):
        model = self.accelerator.unwrap_model(self.model).eval()
        logits, states = forward(model, output)
        factors = naive_factors(self, output, logits, states)
        model.train()
        super()._replace_advantages(output)
        own, sampled = response_mask(output), output["completion_ids"].unsqueeze(-1)
        scaled = logits / self.temperature
        w = logit_gradient_proxy(scaled.log_softmax(-1).gather(-1, sampled).squeeze(-1), log_sum_squared_probs(scaled))
        lengths, energies = own.sum(1), torch.zeros(own.shape)
        expected = torch.zeros(own.shape)
        for row, factor in enumerate(factors):
            energies[row, : lengths[row]] = w[row][own[row]] * factor**2
        groups = [each.unflatten(0, (-1, self.num_generations)) for each in (lengths, energies[:, : lengths.max()])]
        rewards = self._rewards_per_function[:, 0].view(-1, self.num_generations)
        baseline = self.baseline(RolloutGroups(rewards, *groups)).expand(groups[1].shape).flatten(0, 1)
        for row, factor in enumerate(factors):
            advantage = rewards.flatten()[row] - baseline[row, : lengths[row]]
            expected[row][own[row]] = advantage * factor
        self.checked.append((output, factors, expected))


def trained(kind, tmp_path, model, tokenizer, weights, *, baseline=rloo, peft_config=LORA, methods=(), **options):
    given = {"token_weights": weights, "peft_config": peft_config, "methods": methods}
    before = {"checked": []}
    return trainers.trained(kind, tmp_path, model, tokenizer, baseline=baseline, given=given, before=before, **options)


MICRO_BATCHES = dict(per_device_train_batch_size=4, gradient_accumulation_steps=4)


@pytest.mark.parametrize(
    ("weights", "baseline", "options"),
    [
        (TokenWeights("arca"), rloo, {}),
        (TokenWeights("arca", power=2.0, states="pre_norm"), otb, MICRO_BATCHES),
        (TokenWeights("arca", normalise="running"), otb, dict(num_iterations=2, max_steps=4)),
        (TokenWeights("surprisal"), otb, dict(temperature=0.7)),
        (TokenWeights("entropy_reduction"), otb, MICRO_BATCHES),
        (TokenWeights("divergence"), rloo, dict(beta=0.1, num_iterations=2, max_steps=4)),
        (TokenWeights("divergence", normalise="running"), otb, dict(mask_truncated_completions=True)),
    ],
    ids=lambda value: getattr(value, "signal", None) or getattr(value, "__name__", None) or "-".join(value),
)
def test_advantages_are_those_of_naive_loops_over_plain_forwards(
    tmp_path, untrained, tokenizer, weights, baseline, options
):
    """The forwards cover the whole padded batch, without dropout; energies contain the squared factor."""
    trainer = trained(Checking, tmp_path, untrained, tokenizer, weights, baseline=baseline, **options)
    assert len(trainer.checked) == 2
    for output, _, expected in trainer.checked:
        torch.testing.assert_close(output["advantages"], expected, atol=2e-4, rtol=1e-4)
    output, factors, expected = trainer.checked[-1]
    assert max((factor - 1).abs().max() for factor in factors if len(factor)) > 0.05
    rows = [row for row in trainer.state.log_history if "token_weight_gini" in row]
    assert rows[-1]["token_weight_gini"] > 0 and rows[-1]["token_signal_max"] > rows[-1]["token_signal_mean"] > 0
    own = response_mask(output)
    assert rows[-1]["advantage_mean"] == pytest.approx(float(expected[own].mean()), abs=1e-4)
    assert rows[-1]["advantage_spread"] == pytest.approx(float(expected[own].std(correction=0)), abs=1e-4)


def final(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])


TIMES = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "step_time"}


def logged(trainer) -> list[dict]:
    """Returns the log without times and without the metrics of token weights."""
    return [
        {name: value for name, value in row.items() if name not in TIMES and not name.startswith("token_")}
        for row in trainer.state.log_history
    ]


@pytest.mark.parametrize("baseline", [rloo, otb, EnergyProbe(), ob_exact], ids=["rloo", "otb", "probe", "ob_exact"])
def test_uniform_weights_and_those_of_an_adapter_at_its_start_change_no_bit(tmp_path, untrained, tokenizer, baseline):
    def run(weights):
        twin = copy.deepcopy(untrained)
        return trained(OTBTrainer, tmp_path, twin, tokenizer, weights, baseline=baseline, peft_config=FRESH)

    plain, uniform = run(None), run(TokenWeights("uniform"))
    assert torch.equal(final(uniform), final(plain)) and logged(uniform) == logged(plain)
    assert uniform.state.log_history[0]["token_weight_support"] == 1
    if baseline in (rloo, otb):  # the second step of a run is the first in which anything has moved
        arca = run(TokenWeights("arca"))
        exact = ("loss", "grad_norm", "advantage_max", "own_tokens")
        assert all(logged(arca)[0][name] == logged(plain)[0][name] for name in exact)
        assert not torch.equal(final(arca), final(plain))
        gini = [row["token_weight_gini"] for row in arca.state.log_history[:2]]
        assert gini[0] == 0 < gini[1]


class KeepingProbe(EnergyProbe):
    """Keeps the score norms that it gets chunk by chunk."""

    def reduce(self, tokens):
        rows, totals = super().reduce(tokens)
        return rows | {"w": tokens.score_norms}, totals


def test_a_baseline_that_learns_sees_the_same_weighted_energy_in_chunks_as_in_the_whole(tmp_path, untrained, tokenizer):
    kept = KeptSteps()
    options = dict(baseline=KeepingProbe(), max_steps=3, methods=[kept]) | MICRO_BATCHES
    weights = TokenWeights("arca", normalise="running")
    trainer = trained(OTBTrainer, tmp_path, untrained, tokenizer, weights, **options)
    for step in kept.steps:
        expected = advantages_of(step.rollouts, step.baseline) * trainer.gathered(step.factors)
        torch.testing.assert_close(step.advantages, expected)
        torch.testing.assert_close(step.rollouts.reduced["w"], step.rollouts.score_norms)
    first, *_, last = kept.steps
    assert len(kept.steps) == 3 and first.factors.max() == 1 < last.factors.max()
    assert last.baseline.shape == trainer.gathered(last.factors).shape  # the probe was fitted: a value per token


def test_exact_norms_are_those_of_the_weighted_scores(tmp_path, untrained, tokenizer):
    """A backward through sum_t f_t log pi_t gives ||sum_t f_t s_t||^2."""

    class Exact(Method):
        def finish(self, step):
            output, model = step.output, self.trainer.model.eval()
            ids, attention_mask = prompts_with_responses(output)
            predicting = slice(-step.own.mask.shape[1] - 1, -1)
            logits = model(input_ids=ids, attention_mask=attention_mask).logits[:, predicting]
            log_probs = logits.log_softmax(-1).gather(-1, output["completion_ids"].unsqueeze(-1)).squeeze(-1)
            weighted = (log_probs * step.own.unpack(step.factors)).sum(1)
            parameters = [p for p in model.parameters() if p.requires_grad]
            for total, measured in zip(weighted, step.rollouts.sequence_norms.flatten(), strict=True):
                gradients = torch.autograd.grad(total, parameters, retain_graph=True)
                norm = sum(gradient.square().sum() for gradient in gradients)
                torch.testing.assert_close(measured, norm, rtol=2e-3, atol=1e-4)
                checked.append(float(norm))
            model.train()

    checked = []
    options = dict(baseline=ob_exact, max_steps=1, per_device_train_batch_size=8, methods=[Exact()])
    trained(OTBTrainer, tmp_path, untrained, tokenizer, TokenWeights("arca"), **options)
    assert len(checked) == 8


@pytest.mark.parametrize(
    ("weights", "baseline", "policy_rows", "base_rows"),
    [
        (TokenWeights("uniform"), rloo, 0, 0),
        (TokenWeights("surprisal"), rloo, 16, 0),
        (TokenWeights("surprisal"), otb, 16, 0),
        (TokenWeights("arca"), rloo, 16, 16),
        (TokenWeights("arca"), otb, 16, 16),
        (TokenWeights("divergence"), EnergyProbe(), 16, 16),
    ],
    ids=lambda value: getattr(value, "signal", None) or getattr(value, "__name__", None),
)
def test_weights_share_the_forward_of_the_baseline_and_add_one_of_the_base(
    tmp_path, untrained, tokenizer, monkeypatch, weights, baseline, policy_rows, base_rows
):
    rows, original = {True: 0, False: 0}, GRPOTrainer._get_per_token_logps_and_entropies

    def counting(self, model, input_ids, *args, **kwargs):
        if not torch.is_grad_enabled():
            rows[model.get_model_status().enabled] += len(input_ids)
        return original(self, model, input_ids, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", counting)
    trained(OTBTrainer, tmp_path, untrained, tokenizer, weights, baseline=baseline, max_steps=1)
    assert rows == {True: policy_rows, False: base_rows}


def test_an_error_in_the_forward_of_the_base_leaves_the_adapter_enabled_and_no_hook(
    tmp_path, untrained, tokenizer, monkeypatch
):
    def failing(*states):
        raise ZeroDivisionError

    monkeypatch.setattr("otb.training.passes.residuals", failing)
    kept = []
    monkeypatch.setattr(
        Checking, "_replace_advantages", lambda self, output: kept.append(self) or original(self, output)
    )
    original = OTBTrainer._replace_advantages
    with pytest.raises(ZeroDivisionError):
        trained(Checking, tmp_path, untrained, tokenizer, TokenWeights("arca", states="pre_norm"))
    model = kept[0].model
    assert model.get_model_status().enabled is True and model.training
    backbone = model.get_base_model().model
    assert not backbone._forward_hooks and not backbone.norm._forward_pre_hooks


def test_disabling_an_adapter_keeps_what_its_user_has_frozen_whatever_is_raised(untrained):
    model = get_peft_model(untrained, LORA)
    frozen = [p for name, p in model.named_parameters() if "lora_A" in name]
    for parameter in frozen:
        parameter.requires_grad_(False)
    before = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(ZeroDivisionError), adapters.disabled(model):
        assert model.get_model_status().enabled is False
        raise ZeroDivisionError
    assert model.get_model_status().enabled is True
    assert [parameter.requires_grad for parameter in model.parameters()] == before


def test_tool_tokens_have_neither_weight_nor_share(monkeypatch, tmp_path, untrained, tokenizer):
    script = [[call("3+4"), answer(7)], [answer(8)], [call("5"), call("6"), answer(7)], [answer(7)]]
    kept = KeptSteps()
    trainer = scripted(
        monkeypatch, script, tmp_path, untrained, tokenizer, FakeSandbox(),
        baseline=rloo, token_weights=TokenWeights("surprisal"), max_completion_length=200, methods=[kept],
    )  # fmt: skip
    (output,) = trainer.outputs
    own, tool = response_mask(output), output["completion_mask"].bool() & ~response_mask(output)
    assert tool.any() and output["advantages"][tool].eq(0).all()
    ids, attention_mask = prompts_with_responses(output)
    rewards = trainer._rewards_per_function[:, 0].view(-1, 2)
    advantages = (rewards - rewards.flip(1)).flatten()
    assert advantages.abs().max() == 1
    for row, signal in enumerate(kept.steps[0].signals):
        length = int(own[row].sum())
        share = signal[:length] / signal[:length].mean()
        torch.testing.assert_close(output["advantages"][row][own[row]], advantages[row] * share, rtol=1e-4, atol=1e-5)
        assert signal[length:].eq(0).all()


# ---- what is refused


def test_a_base_that_is_trained_too_is_refused_before_training(tmp_path, untrained, tokenizer):
    model = get_peft_model(untrained, FRESH)
    model.get_base_model().model.norm.weight.requires_grad_(True)
    options = dict(processing_class=tokenizer, token_weights=TokenWeights("arca"))
    with pytest.raises(ValueError, match="1 parameters of the base are trained, such as base_model.model.model.norm"):
        OTBTrainer(model, byte_reward, config(tmp_path), dataset(), **options)


def test_a_backbone_without_a_final_norm_is_refused_before_training(tmp_path, untrained, tokenizer, monkeypatch):
    monkeypatch.setattr("otb.adapters.FINAL_NORMS", ("last_norm",))
    with pytest.raises(ValueError, match="Qwen3Model has no norm under a known name .last_norm.. Use states=post_norm"):
        trained(OTBTrainer, tmp_path, untrained, tokenizer, TokenWeights("arca", states="pre_norm"))
