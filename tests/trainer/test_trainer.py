"""Tests OTBTrainer inside real TRL training: advantages against naive loops, parity with TRL, and refusals."""

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from otb import OTBTrainer
from otb.baselines.group_mean import group_mean
from otb.baselines.grpo import grpo
from otb.baselines.none import none
from otb.baselines.otb import otb
from otb.baselines.rloo import rloo
from otb.random_state import isolated_random_state
from tests.support.trainers import PROMPTS, byte_reward, config, dataset, recorded


def nan_for_some(completions, **columns):
    rewards = byte_reward(completions)
    return [None if i % 5 == 0 else reward for i, reward in enumerate(rewards)]


class Counting:
    """Returns the group mean, and keeps the rollouts that it was called with."""

    def __init__(self):
        self.rewards = []

    def __call__(self, rollouts):
        self.rewards.append(rollouts.rewards)
        return group_mean(rollouts)


LORA = LoraConfig(target_modules="all-linear", r=4, lora_alpha=8)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(temperature=0.7),
        dict(reward=nan_for_some),
        dict(mask_truncated_completions=True),
        dict(num_iterations=2, max_steps=4),
        dict(beta=0.1),
        dict(beta=0.1, num_iterations=2),
        dict(peft_config=LORA),
        dict(peft_config=LORA, beta=0.1),
        dict(peft_config=LORA, beta=0.1, num_iterations=2),
        dict(per_device_train_batch_size=4, gradient_accumulation_steps=4),
        dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, steps_per_generation=4),
        dict(num_generations=1),
        dict(num_generations=16),
    ],
    ids=lambda options: (
        "-".join(
            f"{k}={getattr(v, '__name__', type(v).__name__ if k == 'peft_config' else v)}" for k, v in options.items()
        )
        or "defaults"
    ),
)
def test_trainer_advantages_equal_naive_loops_over_full_logits(tmp_path, untrained, tokenizer, options):
    trainer = recorded(tmp_path, untrained, tokenizer, **options)
    assert trainer.batches
    for output, expected in trainer.batches:
        torch.testing.assert_close(output["advantages"].double(), expected, atol=1e-4, rtol=0)
        assert expected.abs().max() > 0.1


@pytest.fixture
def rows_without_gradient(monkeypatch) -> list[int]:
    """Collects how many rollouts each no-grad forward scores."""
    rows = []
    original = GRPOTrainer._get_per_token_logps_and_entropies

    def counting(self, model, input_ids, *args, **kwargs):
        if not torch.is_grad_enabled():
            rows.append(len(input_ids))
        return original(self, model, input_ids, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", counting)
    return rows


@pytest.mark.parametrize(("passes", "options"), [(1, dict()), (1, dict(num_iterations=2)), (2, dict(beta=0.1))])
def test_trainer_adds_at_most_one_forward_and_none_where_trl_makes_its_own(
    tmp_path, untrained, tokenizer, rows_without_gradient, passes, options
):
    """With num_iterations=2 the only pass gives TRL's old log-probs; with beta, one of two is the reference model's."""
    recorded(tmp_path, untrained, tokenizer, max_steps=1, **options)
    assert sum(rows_without_gradient) == passes * 16


def test_baselines_without_energy_pay_for_no_extra_forward(tmp_path, untrained, tokenizer, rows_without_gradient):
    for baseline in (group_mean, grpo, rloo, none):
        recorded(tmp_path, untrained, tokenizer, max_steps=1, baseline=baseline)
    assert rows_without_gradient == []


def test_log_energy_adds_energy_metrics_to_any_arm(tmp_path, untrained, tokenizer):
    plain = recorded(tmp_path, untrained, tokenizer, max_steps=1, baseline=rloo).state.log_history[0]
    logged = recorded(tmp_path, untrained, tokenizer, max_steps=1, baseline=rloo, log_energy=True).state.log_history[0]
    assert {"energy_mean", "energy_spread", "total_power"} <= logged.keys()
    assert not any("energy" in name or "power" in name for name in plain)


@pytest.mark.parametrize(("baseline", "scale_rewards"), [(grpo, "group"), (group_mean, "none")])
@pytest.mark.parametrize("loss_type", ["dr_grpo", "dapo", "grpo"])
def test_sequence_baselines_have_parity_with_trl(tmp_path, untrained, tokenizer, baseline, scale_rewards, loss_type):
    options = dict(max_steps=5, loss_type=loss_type, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    twin = copy.deepcopy(untrained)
    ours = OTBTrainer(
        untrained,
        byte_reward,
        config(tmp_path / "ours", **options),
        dataset(),
        processing_class=tokenizer,
        baseline=baseline,
    )
    ours.train()
    arguments = config(tmp_path / "trl", **options).to_dict()
    arguments |= {"scale_rewards": scale_rewards, "generation_batch_size": None}
    stock = GRPOTrainer(
        twin,
        byte_reward,
        GRPOConfig(**{key: arguments[key] for key in arguments.keys() & GRPOConfig.__dataclass_fields__.keys()}),
        dataset(),
        processing_class=tokenizer,
    )
    stock.train()
    losses = [[row["loss"] for row in trainer.state.log_history if "loss" in row] for trainer in (ours, stock)]
    assert len(losses[0]) == 5
    assert any(losses[0]) or loss_type == "grpo"  # the mean of group-centred advantages is 0 by construction
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-6, atol=1e-9)
    for mine, theirs in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_drop_in_takes_a_plain_grpo_config_and_positional_arguments(tmp_path, untrained, tokenizer):
    arguments = GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", max_steps=1,
        num_generations=4, per_device_train_batch_size=8, max_completion_length=8, save_strategy="no",
    )  # fmt: skip
    trainer = OTBTrainer(untrained, byte_reward, arguments, dataset(), None, tokenizer)
    trainer.train()
    assert trainer.state.global_step == 1


def test_evaluation_and_logging_frequency_leave_the_training_trajectory_alone(tmp_path, untrained, tokenizer):
    def final_weights(**options):
        trainer = OTBTrainer(
            copy.deepcopy(untrained),
            byte_reward,
            config(tmp_path, max_steps=3, **options),
            dataset(),
            Dataset.from_dict({"prompt": PROMPTS[:4]}),
            processing_class=tokenizer,
        )
        trainer.train()
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    plain = final_weights()
    evaluated = final_weights(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8, logging_steps=3)
    assert torch.equal(plain, evaluated)


def test_generation_by_continuous_batching_feeds_no_baseline_in_an_evaluation(tmp_path, untrained, tokenizer):
    """TRL calls `train()` after such a generation, so the rest of an evaluation would otherwise count as training."""
    trainer = OTBTrainer(
        untrained,
        byte_reward,
        config(tmp_path, use_transformers_continuous_batching=True, max_steps=1, per_device_eval_batch_size=8),
        dataset(),
        Dataset.from_dict({"prompt": PROMPTS[:4]}),  # two batches
        processing_class=tokenizer,
        baseline=(calls := Counting()),
    )
    assert trainer.baseline is calls
    trainer.train()
    assert len(calls.rewards) == 1
    trainer.evaluate()
    assert len(calls.rewards) == 1 and not trainer.model.training


def test_isolated_random_state_restores_every_generator():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with isolated_random_state(seed=11):
        first = torch.rand(2)
    with isolated_random_state(seed=11):
        assert torch.equal(first, torch.rand(2))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("in_use", "touched"), [(True, [1]), (False, [])])
def test_isolated_random_state_asks_and_seeds_no_gpu_but_the_current_one_in_use(monkeypatch, in_use, touched):
    """Reading another GPU's state takes memory there: each of eight processes would take memory on all eight."""
    asked, restored, seeded = [], [], []
    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: in_use,
        "device_count": lambda: 8,
        "current_device": lambda: 1,
        "get_rng_state": lambda gpu: asked.append(gpu) or f"state of {gpu}",
        "set_rng_state": lambda state, gpu: restored.append((state, gpu)),
        "manual_seed": lambda seed: seeded.append(1),
        "manual_seed_all": lambda seed: seeded.extend(range(8)),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    expected = torch.rand(2, generator=torch.Generator().manual_seed(11))
    with isolated_random_state(seed=11):
        assert torch.equal(torch.rand(2), expected)
    assert asked == seeded == touched and restored == [(f"state of {gpu}", gpu) for gpu in touched]


def test_sampling_options_of_the_model_itself_are_refused(tmp_path, untrained, tokenizer):
    untrained.generation_config.min_p = 0.5  # TRL passes None, which generate() fills from here
    with pytest.raises(ValueError, match="min_p=0.5 in the model's generation_config.json"):
        recorded(tmp_path, untrained, tokenizer)


def test_per_token_baseline_that_does_not_say_so_is_refused(tmp_path, untrained, tokenizer):
    def undeclared(rollouts):
        return rollouts.rewards.new_zeros(len(rollouts.rewards), 1, 7)

    untrained.generation_config.eos_token_id = tokenizer.eos_token_id  # rare in an untrained policy: all reach 7 tokens
    with pytest.raises(ValueError, match="Declare it: @declare"):
        recorded(tmp_path, untrained, tokenizer, baseline=undeclared, max_completion_length=7)


@pytest.mark.parametrize("baseline", [otb, rloo])
def test_truncated_rollouts_that_the_loss_masks_are_still_counted_as_tokens(tmp_path, untrained, tokenizer, baseline):
    untrained.generation_config.eos_token_id = tokenizer.eos_token_id  # so that nearly all of 16 reach the limit of 3
    options = dict(baseline=baseline, mask_truncated_completions=True, max_completion_length=3, max_steps=1)
    row = recorded(tmp_path, untrained, tokenizer, **options).state.log_history[0]
    assert row["own_tokens"] >= 44


def test_energy_of_a_policy_with_dropout_is_measured_without_touching_the_training(tmp_path, untrained, tokenizer):
    lora = LoraConfig(target_modules="all-linear", r=4, lora_dropout=0.2)

    def losses(**options):
        twin = copy.deepcopy(untrained)
        trainer = recorded(tmp_path, twin, tokenizer, baseline=grpo, peft_config=lora, max_steps=3, **options)
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    assert losses() == losses(log_energy=True)


def test_accuracy_is_absent_where_the_reward_is_a_weighted_sum(tmp_path, untrained, tokenizer):
    def half(completions, **columns):
        return [0.5] * len(completions)

    arguments = config(tmp_path, max_steps=1, reward_weights=[0.5, 0.25])
    trainer = OTBTrainer(untrained, [byte_reward, half], arguments, dataset(), processing_class=tokenizer)
    trainer.train()
    row = trainer.state.log_history[0]
    assert "accuracy" not in row and row["reward_mean"] > 0


def test_config_refuses_scaling_outside_the_baseline(tmp_path):
    with pytest.raises(ValueError, match="leaves scaling to the baseline"):
        config(tmp_path, scale_rewards="group")


def test_generation_in_chunks_gives_every_rollout_its_prompt(tmp_path, untrained, tokenizer):
    """Groups are whole and in the order of the prompts, as many as without chunks; only the draws differ."""
    whole = recorded(tmp_path / "whole", copy.deepcopy(untrained), tokenizer, max_steps=1)
    chunks = recorded(tmp_path / "chunks", untrained, tokenizer, max_steps=1, rows_per_generation=5)
    (one, _), (other, _) = whole.batches[0], chunks.batches[0]
    assert torch.equal(one["prompt_ids"], other["prompt_ids"])
    assert len(other["completion_ids"]) == len(one["completion_ids"]) == 16
    torch.testing.assert_close(other["advantages"], chunks.batches[0][1].float(), rtol=1e-4, atol=1e-5)
