"""Runs one of the two ranks of tests/trainer/test_distributed.py: training steps whose groups span both ranks.

Arguments: the folder of the policy, and a folder in which each training gets a subfolder.
"""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from otb import OTBTrainer
from otb.baselines import declare
from otb.baselines.energy_probe import EnergyProbe
from otb.baselines.rloo import rloo
from otb.loss_inputs import response_mask
from otb.methods.auxiliary import MultiTokenPrediction
from otb.methods.auxiliary_head import AuxiliaryHead
from otb.methods.improvement import PolicyImprovement
from otb.methods.schedules import LengthTriggeredDecay
from otb.methods.token_weights import TokenWeights
from otb.score_norms import log_sum_squared_probs, logit_gradient_proxy
from tests.support.improvement_updates import WatchedTrainer, weights_of
from tests.support.trainers import KeptSteps, group_gradients, method_of, trained


def trained_here(kind, policy: str, output: str, options: dict, **given):
    """Trains a trainer of a class and returns it; 6 rollouts per rank in groups of 4. given: further arguments."""
    shape = dict(per_device_train_batch_size=6, num_generations=4, ddp_find_unused_parameters=False)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    return trained(kind, output, model, tokenizer, given=given, **(shape | options))


def leave(trainer, output: str, **found) -> None:
    """Writes what this rank found."""
    torch.save(found, Path(output, f"rank{trainer.accelerator.process_index}.pt"))


class RankTrainer(OTBTrainer):
    """Writes this rank's rows: w per own token from full logits, reward, and OTB's advantages."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        attention = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
        mask = output["completion_mask"].bool()
        with torch.no_grad():
            model = self.accelerator.unwrap_model(self.model)
            logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1][:, -mask.shape[1] :]
        log_probs = logits.log_softmax(-1).gather(-1, output["completion_ids"].unsqueeze(-1)).squeeze(-1)
        w = logit_gradient_proxy(log_probs, log_sum_squared_probs(logits))
        first = self.accelerator.process_index * len(mask)
        rows = [
            {
                "w": w[i][mask[i]].tolist(),
                "reward": float(self._rewards_per_function[first + i, 0]),
                "advantages": output["advantages"][i][mask[i]].tolist(),
            }
            for i in range(len(mask))
        ]
        Path(self.args.output_dir, f"rank{self.accelerator.process_index}.json").write_text(json.dumps(rows))
        return output


@declare(needs={"hidden_states", "score_norms", "sequence_norms", "prefix_norms"}, per_token=True)
class KeepingProbe(EnergyProbe):
    """Extends the energy probe: keeps this rank's inputs and the rollouts of all ranks that it saw."""

    def __init__(self, **options):
        super().__init__(**options)
        self.kept = []

    def reduce(self, tokens):
        self.kept.append({"own": tokens.own, "hidden": tokens.hidden_states, "w": tokens.score_norms})
        rows, totals = super().reduce(tokens)
        return rows | {"hidden": tokens.hidden_states}, totals

    def update(self, rollouts):
        super().update(rollouts)
        names = ("rewards", "lengths", "score_norms", "sequence_norms", "prefix_norms", "reduced", "totals")
        self.kept.append({name: getattr(rollouts, name) for name in names})


def probe(policy: str, output: str) -> None:
    """Trains two steps with an energy probe; each rank writes what it saw, its state and its weights."""
    options = dict(max_steps=2, save_strategy="steps", save_steps=2, baseline=KeepingProbe(group_correction=True))
    trainer = trained_here(OTBTrainer, policy, output, options)
    state = trainer.baseline.state_dict()
    leave(trainer, output, kept=trainer.baseline.kept, state=state, weights=weights_of(trainer))


class NoiseTrainer(OTBTrainer):
    """Writes the gradient of each of this rank's prompt groups, before the weights change."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        file = Path(self.args.output_dir, f"gradients-rank{self.accelerator.process_index}.pt")
        torch.save(group_gradients(self, output), file)
        return output


def noise(policy: str, output: str) -> None:
    """Trains one step of two micro-batches per rank, with two groups each."""
    options = dict(max_steps=1, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    trainer = trained_here(NoiseTrainer, policy, output, options | {"measure_gradient_noise": True})
    if trainer.accelerator.is_main_process:
        Path(output, "metrics.json").write_text(json.dumps(trainer.state.log_history[0]))


class RatioTrainer(OTBTrainer):
    """Keeps log pi of the policy minus the sampler's before every step: this rank's own tokens, NaN elsewhere."""

    def __init__(self, *args, **kwargs):
        self.ratios = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        ratio = output["old_per_token_logps"] - output["sampling_per_token_logps"]
        self.ratios.append(ratio.masked_fill(~response_mask(output), torch.nan))
        return output


def copied(policy: str, output: str) -> None:
    """Trains four steps with a bfloat16 sampler copy and a learning rate that follows the lengths."""
    options = dict(max_steps=4, sampler_dtype="bfloat16", vllm_importance_sampling_mode="token_truncate")
    schedule = LengthTriggeredDecay(warmup=0, baseline_steps=1, ratio=1.001, period_factor=0.5)
    trainer = trained_here(RatioTrainer, policy, output, options, lr_schedule=schedule)
    leave(trainer, output, ratios=trainer.ratios, rows=trainer.state.log_history[:4])


def otb(policy: str, output: str) -> None:
    """Trains one step whose second group has two rollouts on each rank."""
    trained_here(RankTrainer, policy, output, {"max_steps": 1})


class WeighingTrainer(OTBTrainer):
    """Keeps the token weights of this rank's rows in each step, and the running mean from before the step."""

    def __init__(self, *args, **kwargs):
        self.steps, self.kept = KeptSteps(), []
        super().__init__(*args, methods=[self.steps], **kwargs)

    def _replace_advantages(self, output):
        state = self.token_weights.state_dict()
        super()._replace_advantages(output)
        signals, own = self.steps.steps[-1].signals, response_mask(output)
        first = self.accelerator.process_index * len(signals)
        rewards = self._rewards_per_function[first : first + len(signals), 0]
        lists = {"own": own, "signals": signals, "rewards": rewards, "advantages": output["advantages"]}
        self.kept.append(lists | {"state": state})


def weights(policy: str, output: str) -> None:
    """Trains three steps with ARCA and the running mean; each rank writes what it kept, and its weights."""
    options = dict(max_steps=3, save_strategy="steps", save_steps=3, baseline=rloo)
    arca = TokenWeights("arca", normalise="running")
    adapter = LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False)
    trainer = trained_here(WeighingTrainer, policy, output, options, token_weights=arca, peft_config=adapter)
    state = trainer.token_weights.state_dict()
    leave(trainer, output, kept=trainer.kept, weights=weights_of(trainer), state=state)


def improvement(policy: str, output: str) -> None:
    """Trains four steps with improvement updates: two micro-batches per rank, plain SGD, scaled advantages."""
    options = dict(max_steps=4, per_device_train_batch_size=3, gradient_accumulation_steps=2, optim="sgd")
    options |= dict(learning_rate=3.0, max_grad_norm=0.0, save_strategy="steps", save_steps=4)
    pipo = PolicyImprovement("shuffled", window=2, cap=3.0, advantages="scaled")
    trainer = trained_here(WatchedTrainer, policy, output, options, improvement=pipo)
    leave(trainer, output, updates=trainer.updates, scaled=trainer.scaled, kept=trainer.watched._kept)


class ToldTrainer(OTBTrainer):
    """Makes the tokens of rollout i in the n-th batch depend only on i and n, for any number of processes."""

    batches = 0

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        first = self.accelerator.process_index * len(prompt_ids)
        said = []
        for i in range(first, first + len(prompt_ids)):
            drawn = torch.Generator().manual_seed(1000 * self.batches + i)
            length = int(torch.randint(1, self.max_completion_length, (), generator=drawn))
            said.append([*torch.randint(200, 300, (length,), generator=drawn).tolist(), self.eos_token_ids[0]])
        self.batches += 1
        return said, None


def head(policy: str, output: str, rollouts: int = 6) -> None:
    """Trains four updates on two batches with a head whose loss is weighted by lambda. rollouts: of this process."""
    options = dict(max_steps=4, num_iterations=2, per_device_train_batch_size=rollouts, loss_type="dapo")
    occ = MultiTokenPrediction("occ", ratio_to="head")
    trainer = trained_here(ToldTrainer, policy, output, options, auxiliary=occ)
    modules = (trainer.accelerator.unwrap_model(trainer.model), method_of(trainer, AuxiliaryHead).head)
    flat = [torch.cat([p.detach().flatten() for p in module.parameters()]) for module in modules]
    leave(trainer, output, weights=flat, rows=trainer.state.log_history[:4])


if __name__ == "__main__":
    for train in (otb, probe, noise, copied, weights, improvement, head):
        folder = Path(sys.argv[2], train.__name__)
        folder.mkdir(exist_ok=True)
        train(sys.argv[1], str(folder))
