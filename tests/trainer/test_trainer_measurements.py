"""Tests what the trainer measures for a baseline: hidden states and exact norms; and the state of a learning one."""

import copy

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from otb import OTBTrainer
from otb.baselines import declare, name_of
from otb.baselines.damped_probe import DampedProbe
from otb.baselines.energy_probe import EnergyProbe
from otb.baselines.ob_exact import ob_exact
from otb.baselines.otb_exact import otb_exact
from otb.baselines.value import Value
from otb.exact_norms import prefix_norms, sequence_norms
from otb.loss_inputs import prompts_with_responses, response_mask
from otb.training.trainer import BASELINE_STATE
from tests.support.trainers import byte_reward, config, dataset, recorded


@declare(needs={"hidden_states", "score_norms", "sequence_norms", "prefix_norms"})
class Everything:
    """Keeps the rollouts that it gets."""

    def __init__(self):
        self.steps = []

    def reduce(self, tokens):
        self.chunks = getattr(self, "chunks", 0) + 1
        rows = {"hidden": tokens.hidden_states, "log_probs": tokens.log_probs, "w": tokens.score_norms}
        return rows | {"scored": tokens.scored}, {"own": tokens.own.sum()}

    def __call__(self, rollouts):
        return rollouts.rewards.new_zeros(len(rollouts.rewards), 1, 1)

    def update(self, rollouts):
        self.steps.append(rollouts)

    def state_dict(self):
        return {}


class Checking(OTBTrainer):
    """Compares the baseline's inputs with a plain forward over the padded batch, before the weights change."""

    def _replace_advantages(self, output):
        super()._replace_advantages(output)
        rollouts = self.baseline.steps[-1]
        ids, attention_mask = prompts_with_responses(output)
        own, width = response_mask(output), output["completion_ids"].shape[1]
        with torch.no_grad():
            plain = self.model.eval()(input_ids=ids, attention_mask=attention_mask, output_hidden_states=True)
        hidden, logits = plain.hidden_states[-1][:, -width - 1 : -1], plain.logits[:, -width - 1 : -1]
        log_probs = (logits / self.temperature).log_softmax(-1).gather(-1, output["completion_ids"].unsqueeze(-1))
        flat = {name: rows.flatten(0, 1) for name, rows in rollouts.reduced.items()}
        for row in range(len(own)):
            length = int(own[row].sum())
            torch.testing.assert_close(flat["hidden"][row, :length], hidden[row][own[row]], atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(flat["log_probs"][row, :length], log_probs[row][own[row], 0], atol=1e-4, rtol=0)
            assert flat["hidden"][row, length:].eq(0).all()
        assert torch.equal(flat["w"], rollouts.score_norms.flatten(0, 1))
        assert torch.equal(rollouts.reduced["scored"], rollouts.scored)
        assert rollouts.totals["own"] == rollouts.lengths.sum() == own.sum()
        full = (ids, attention_mask, torch.cat([torch.zeros_like(output["prompt_mask"]).bool(), own], 1))
        for name, norms in (("sequence_norms", sequence_norms), ("prefix_norms", prefix_norms)):
            assert torch.equal(getattr(rollouts, name).flatten(0, 1), norms(self.model, *full, self.temperature))
        self.model.train()


def nan_for_some(completions, **columns):
    return [None if i % 5 == 0 else reward for i, reward in enumerate(byte_reward(completions))]


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(temperature=0.7, reward=nan_for_some),
        dict(mask_truncated_completions=True),
        dict(num_iterations=2),
        dict(peft_config=LoraConfig(target_modules="all-linear", r=4), beta=0.1),
        dict(per_device_train_batch_size=4, gradient_accumulation_steps=4, num_generations=8),
        dict(num_generations=1),
    ],
    ids=lambda options: "-".join(map(str, options)) or "defaults",
)
def test_baseline_is_given_the_states_that_predict_each_own_token(tmp_path, untrained, tokenizer, options):
    reward, peft_config = options.pop("reward", byte_reward), options.pop("peft_config", None)
    arguments = config(tmp_path, **options)
    trainer = Checking(
        untrained,
        reward,
        arguments,
        dataset(),
        processing_class=tokenizer,
        baseline=Everything(),
        peft_config=peft_config,
    )
    trainer.train()
    assert trainer.baseline.steps and trainer.baseline.chunks >= 4 * len(trainer.baseline.steps)
    assert not trainer.model.base_model._forward_hooks


@pytest.mark.parametrize(("passes", "options"), [(1, dict()), (2, dict(num_iterations=2))])
def test_hidden_states_cost_one_forward_also_where_trl_makes_its_own(
    tmp_path, untrained, tokenizer, monkeypatch, passes, options
):
    rows, original = [], GRPOTrainer._get_per_token_logps_and_entropies

    def counting(self, model, input_ids, *args, **kwargs):
        if not torch.is_grad_enabled():
            rows.append(len(input_ids))
        return original(self, model, input_ids, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", counting)
    recorded(tmp_path, untrained, tokenizer, max_steps=1, baseline=EnergyProbe(), **options)
    assert sum(rows) == passes * 16


@pytest.mark.parametrize(
    "baseline", [EnergyProbe(group_correction=True), DampedProbe(), Value(), ob_exact, otb_exact], ids=name_of
)
def test_every_estimator_trains(tmp_path, untrained, tokenizer, baseline):
    trainer = recorded(tmp_path, untrained, tokenizer, max_steps=3, baseline=baseline)
    for output, _ in trainer.batches:
        assert output["advantages"].isfinite().all() and output["advantages"].abs().max() > 0.1
        assert output["advantages"].dtype == torch.float32
    assert "energy_mean" in trainer.state.log_history[0] or not isinstance(baseline, EnergyProbe)


@pytest.mark.parametrize("make", [lambda: EnergyProbe(group_correction=True), Value], ids=["energy_probe", "value"])
def test_training_resumed_from_a_checkpoint_ends_as_if_uninterrupted(tmp_path, untrained, tokenizer, make):
    def trained(model, resume=None):
        arguments = config(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
        trainer = OTBTrainer(model, byte_reward, arguments, dataset(), processing_class=tokenizer, baseline=make())
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = trained(copy.deepcopy(untrained))
    half = trained(untrained, resume=str(tmp_path / "checkpoint-2"))
    for mine, theirs in zip(half.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    mine, theirs = (trainer.baseline.state_dict() for trainer in (half, whole))
    assert str(mine) == str(theirs) and mine

    (tmp_path / "checkpoint-2" / BASELINE_STATE).unlink()
    with pytest.raises(ValueError, match="has no baseline.pt"):
        trained(untrained, resume=str(tmp_path / "checkpoint-2"))


def test_two_trainers_given_one_probe_do_not_learn_from_each_other(tmp_path, untrained, tokenizer):
    probe = EnergyProbe()
    for _ in range(2):
        trainer = recorded(tmp_path, copy.deepcopy(untrained), tokenizer, max_steps=2, baseline=probe)
        assert float(trainer.baseline._state["rollouts"]) == 0.9 * 16 + 16
    assert not probe.fitted


def test_exact_norms_of_a_large_policy_are_refused_before_training(tmp_path, untrained, tokenizer, monkeypatch):
    monkeypatch.setattr("otb.exact_norms.MAX_PARAMETERS", 1000)
    with pytest.raises(ValueError, match="exact score norms work for 1 to 1,000"):
        recorded(tmp_path, untrained, tokenizer, baseline=ob_exact)
