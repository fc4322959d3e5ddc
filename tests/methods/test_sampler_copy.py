"""Tests a sampler copy: the tokens that it draws, their recorded log-probs, and TRL's correction for the mismatch."""

import copy
import math

import pytest
import torch
from peft import LoraConfig

from experiments.checks import check
from otb import OTBTrainer
from otb.baselines.group_mean import group_mean
from otb.baselines.otb import otb
from otb.baselines.rloo import rloo
from otb.errors import RunError
from otb.loss_inputs import response_mask
from otb.methods import Step
from otb.methods.mismatch import SamplerMismatch
from otb.rollouts import OwnTokens
from otb.training import options as otb_options
from tests.support import trainers
from tests.support.recipes import composed
from tests.support.tool_trainers import FakeSandbox, ScriptedTrainer, answer, call
from tests.support.trainers import log_probs_of, method_of, naive_otb_advantages, recorded

MISMATCH = {"log_ppl_abs_diff_mean", "mismatch_kl", "mismatch_k3", "mismatch_chi2_token", "mismatch_chi2_seq"}


class KeepingTrainer(OTBTrainer):
    """Keeps every generation's batch for the loss, with the policy's log-probs at that moment."""

    def __init__(self, *args, **kwargs):
        self.batches = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        with torch.no_grad():
            self.batches.append((output, log_probs_of(self.model, output, self.temperature)))
        return output


def trained(folder, model, tokenizer, baseline=rloo, peft_config=None, **options) -> KeepingTrainer:
    options = {"sampler_dtype": "bfloat16", "max_steps": 1} | options
    given = {"peft_config": peft_config}
    return trainers.trained(KeepingTrainer, folder, model, tokenizer, baseline=baseline, given=given, **options)


LORA = LoraConfig(target_modules="all-linear", r=4, lora_alpha=8)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"peft_config": LORA}], ids=["full", "cool", "lora"])
def test_what_the_sampler_is_said_to_have_given_a_token_is_what_its_own_forward_gives(
    tmp_path, untrained, tokenizer, options
):
    trainer = trained(tmp_path, untrained, tokenizer, max_steps=2, learning_rate=0.03, **options)
    assert {p.dtype for p in trainer.vllm_generation.copy.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    output, trained_log_probs = trainer.batches[1]  # after an update that moves every weight by 0.03
    own = response_mask(output)
    sampled = output["sampling_per_token_logps"][own]
    by_itself = log_probs_of(trainer.vllm_generation.copy, output, trainer.temperature)[own]
    away = (sampled - trained_log_probs[own]).abs()
    # decoding token by token rounds differently from one forward; an old policy would differ far more
    assert (sampled - by_itself).abs().mean() <= away.mean() < 0.05
    before = log_probs_of(untrained.__class__.from_pretrained(untrained.name_or_path), output, trainer.temperature)[own]
    assert (sampled - before).abs().mean() > 5 * away.mean() > 0


def test_copy_takes_the_rounded_weights_of_every_step(tmp_path, untrained, tokenizer):
    trainer = trained(tmp_path, untrained, tokenizer, max_steps=2)
    trainer.vllm_generation.sync_weights()
    for mine, theirs in zip(trainer.vllm_generation.copy.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(mine, theirs.bfloat16())
    assert all(buffer.dtype == torch.float32 for buffer in trainer.vllm_generation.copy.buffers())


def test_a_copy_of_the_same_precision_is_the_policy_that_samples_itself(tmp_path, untrained, tokenizer, monkeypatch):
    """Rollouts, log-probs and weights are equal bit for bit, because the copy differs only in its precision."""
    monkeypatch.setattr(otb_options, "SAMPLER_DTYPES", ("float32",))
    twin = copy.deepcopy(untrained)
    usual = dict(max_steps=3, vllm_importance_sampling_correction=False)
    plain = trained(tmp_path / "plain", untrained, tokenizer, sampler_dtype=None, **usual)
    copied = trained(tmp_path / "copied", twin, tokenizer, sampler_dtype="float32", **usual)
    for (mine, log_probs), (other, _) in zip(copied.batches, plain.batches, strict=True):
        assert torch.equal(mine["completion_ids"], other["completion_ids"])
        own = response_mask(mine)
        torch.testing.assert_close(mine["sampling_per_token_logps"][own], log_probs[own], atol=1e-4, rtol=0)
    for mine, other in zip(copied.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert copied.state.log_history[0]["mismatch_k3"] < 1e-8
    assert not MISMATCH & plain.state.log_history[0].keys()


def test_importance_ratios_are_those_of_the_two_log_probs_clipped(tmp_path, untrained, tokenizer):
    usual = dict(vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=1.001)
    trainer = trained(tmp_path, untrained, tokenizer, **usual)
    output, trained_log_probs = trainer.batches[0]
    own = response_mask(output)
    expected = (trained_log_probs - output["sampling_per_token_logps"]).exp()[own]
    assert (expected > 1.001).any() and (expected < 1).any()
    torch.testing.assert_close(output["importance_sampling_ratio"][own], expected.clamp(max=1.001), atol=1e-4, rtol=0)


def test_energies_carry_the_squared_ratio_as_they_do_with_vllm(tmp_path, untrained, tokenizer):
    """At this temperature the ratios are so far from 1 that leaving them out would change the advantages visibly."""
    usual = dict(vllm_importance_sampling_mode="token_truncate", sampler_dtype="bfloat16", temperature=0.1, max_steps=1)
    trainer = recorded(tmp_path, untrained, tokenizer, **usual)
    ((output, expected),) = trainer.batches
    torch.testing.assert_close(output["advantages"].double(), expected, atol=1e-4, rtol=0)
    without = {name: value for name, value in output.items() if name != "importance_sampling_ratio"}
    assert (naive_otb_advantages(trainer, without) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("baseline", [group_mean, otb], ids=["group_mean", "otb"])
def test_mismatch_is_measured_without_the_correction_too(tmp_path, untrained, tokenizer, baseline):
    """Rollouts are the same with and without the correction, and so is the mismatch; only the weights differ."""
    twin, usual = copy.deepcopy(untrained), dict(vllm_importance_sampling_mode="token_truncate")
    on = trained(tmp_path / "on", untrained, tokenizer, baseline, **usual)
    off = trained(tmp_path / "off", twin, tokenizer, baseline, vllm_importance_sampling_correction=False)
    assert "importance_sampling_ratio" not in off.batches[0][0]
    for name in MISMATCH:
        mine, other = (trainer.state.log_history[0][name] for trainer in (on, off))
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-7) and mine != 0, name
    assert any(
        not torch.equal(mine, other) for mine, other in zip(on.model.parameters(), off.model.parameters(), strict=True)
    )


@pytest.mark.parametrize("baseline", [rloo, otb], ids=["rloo", "otb"])
def test_dropout_of_training_is_no_mismatch(tmp_path, untrained, tokenizer, baseline):
    """TRL's pass for the importance ratios uses the adapter's dropout, but the sampler has no dropout."""
    usual, found = dict(vllm_importance_sampling_mode="token_truncate"), []
    for dropout in (0.0, 0.3):
        lora = LoraConfig(target_modules="all-linear", r=4, lora_dropout=dropout, init_lora_weights=False)
        twin = copy.deepcopy(untrained)
        row = trained(tmp_path / str(dropout), twin, tokenizer, baseline, lora, **usual).state.log_history[0]
        found.append({name: row[name] for name in MISMATCH})
    assert found[1] == pytest.approx(found[0], rel=1e-2, abs=1e-6) and found[0]["mismatch_k3"] > 1e-5


def test_a_band_drops_rollouts_and_the_mismatch_still_counts_them(tmp_path, untrained, tokenizer):
    twin, usual = copy.deepcopy(untrained), dict(vllm_importance_sampling_mode="token_truncate")
    free = trained(tmp_path / "free", untrained, tokenizer, **usual).state.log_history[0]
    narrow = math.exp(free["log_ppl_abs_diff_mean"])  # about half of the rollouts are further away
    band = (1 / narrow, narrow)
    trainer = trained(tmp_path / "band", twin, tokenizer, geometric_ratio_band=band, **usual)
    banded = trainer.state.log_history[0]
    assert 0 < banded["dropped_by_mismatch"] < 1
    assert {name: banded[name] for name in MISMATCH} == {name: free[name] for name in MISMATCH}
    batch = trainer.batches[0][0]
    assert batch["num_items_in_batch"] == response_mask(batch).sum()  # which dapo, cispo and vespo divide by


def test_mismatch_is_not_measured_by_a_pass_that_would_not_see_images(tmp_path, untrained, tokenizer):
    trainer = trained(tmp_path, untrained, tokenizer, vllm_importance_sampling_correction=False)
    batch, mismatch = trainer.batches[0][0], method_of(trainer, SamplerMismatch)
    trainer._metrics["train"].clear()
    mismatch.begin(batch)
    mismatch.measured(Step(batch | {"pixel_values": torch.zeros(1)}, OwnTokens(response_mask(batch))))
    assert not trainer._metrics["train"]
    mismatch.measured(Step(batch, OwnTokens(response_mask(batch))))
    assert trainer._metrics["train"].keys() >= set(MISMATCH)


def test_responses_are_drawn_a_few_rows_at_a_time(tmp_path, untrained, tokenizer, monkeypatch):
    rows, generate = [], type(untrained).generate
    monkeypatch.setattr(
        type(untrained),
        "generate",
        lambda self, input_ids, **k: rows.append(len(input_ids)) or generate(self, input_ids, **k),
    )
    trainer = trained(tmp_path, untrained, tokenizer, rows_per_generation=6)
    assert rows == [6, 6, 4]
    output = trainer.batches[0][0]
    assert output["sampling_per_token_logps"].shape == output["completion_ids"].shape == response_mask(output).shape


def test_turns_with_tools_keep_each_own_token_beside_its_log_prob(tmp_path, untrained, tokenizer):
    """The scripted sampler gives the n-th token of a turn the log-prob -n / 8; a tool's tokens have none."""
    script = [[call("7"), answer(7)], [answer(7)], [call("1"), call("2"), answer(3)], [answer(3)]]
    trainer = ScriptedTrainer(script, tmp_path, untrained, tokenizer, FakeSandbox(), sampler_dtype="bfloat16")

    def generate(prompts, **_):
        said = trainer.say(prompts)
        return None, said, [[[-n / 8] for n in range(len(ids))] for ids in said], None

    trainer.vllm_generation.generate = generate
    trainer.train()
    output = trainer.outputs[0]
    turns = [[len(tokenizer(text)["input_ids"]) for text in rollout] for rollout in script]
    own = response_mask(output)
    for row, lengths in enumerate(turns):
        expected = [-n / 8 for length in lengths for n in range(length)]
        assert output["sampling_per_token_logps"][row][own[row]].tolist() == expected
    assert output["tool_mask"].bool().logical_not().any()
    assert trainer.row().keys() >= MISMATCH


REFUSED = {  # overrides beside rollouts_by=hf_bfloat16 -> what the message says
    "model.dtype=bfloat16": ("model.dtype=bfloat16", "a bfloat16 copy of a float32 policy", "Use model.dtype=float32"),
    "parallel=fsdp2": ("parallel=fsdp2", "whole policy on every process", "Use parallel=ddp"),
    "++trainer.use_transformers_continuous_batching=true": (
        "trainer.use_transformers_continuous_batching=true",
        "or rollouts_by=hf.",
    ),
    "rollouts_by.rows=0": ("rollouts_by.rows=0", "whole number >= 1"),
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_cannot_go_with_a_copy_is_refused_before_a_model_loads(overrides):
    with pytest.raises(RunError) as refusal:
        check(composed("rollouts_by=hf_bfloat16", "baseline=rloo", overrides), processes=8)
    assert all(part in str(refusal.value) for part in REFUSED[overrides]), refusal.value


def test_what_goes_with_a_copy_is_taken():
    check(composed("rollouts_by=hf_bfloat16", "geometric_ratio_band=[0.99,1.01]"))
    check(composed("rollouts_by=hf_bfloat16", "++trainer.vllm_importance_sampling_correction=false"))


def test_trainer_refuses_a_model_whose_own_configuration_changes_what_is_sampled(tmp_path, untrained, tokenizer):
    untrained.generation_config.typical_p = 0.5
    with pytest.raises(ValueError, match="typical_p=0.5 in the model's generation_config.json: the sampler's"):
        trained(tmp_path, untrained, tokenizer)
