"""OTBTrainer: TRL's GRPOTrainer with advantages from any baseline of `otb.baselines`.

No method of TRL is copied. Those below are extended: each does its part and calls the next class by super(). A training
step of a run goes through eight classes: Run (experiments.run_trainer.RunTrainer) > Tool
(otb.tool_rollouts.ToolTrainer) > OTB (OTBTrainer, here) > Measuring (otb.measuring_trainer.MeasuringTrainer) > Lean
(otb.lean_trainer.LeanTrainer) > Improving (otb.improving_trainer.ImprovingTrainer) > GRPO (trl.GRPOTrainer) > HF
(transformers.Trainer). The order of one step, each line with the classes that take part in it:

    training_step                              Run > OTB > GRPO   once per micro-batch
      _prepare_inputs                          OTB > Improving > GRPO  the next micro-batch, after making new ones:
        _generate_and_score_completions        OTB > Lean > GRPO  prompts -> everything that the loss reads
          _generate                            Tool > OTB > GRPO  prompts -> responses; counts their tokens
            _generate_single_turn              Tool > OTB > GRPO  one turn of every unfinished rollout
            _get_tool_suffix_ids               Tool > GRPO        the reply to a tool call
          _get_per_token_logps_and_entropies   OTB > Measuring > Lean > Improving > GRPO  a pass, here with log sum pi^2
          _calculate_rewards                   Measuring > GRPO   rewards, which are kept
          _replace_advantages                  OTB                pack, measure, baseline, advantages, weights, unpack
            _measured                          Measuring          score norms and what else the baseline needs
            _log_rollouts                      Run > OTB          metrics of the rollouts
        _improve                               Improving          an optimizer step on the batch before, if asked for
      _compute_loss                            OTB > Lean > GRPO  with the auxiliary head's, then the backward pass
        _is_lean                               OTB > Lean > Improving  whether it may leave out what has no gradient
        _get_per_token_logps_and_entropies     OTB > Measuring > Lean > Improving > GRPO  its forward, or that pass
    _get_grad_norm                             Run > OTB > HF     once per optimizer step, before it
    _maybe_log_save_evaluate                   Run > HF           samples, evaluation, checkpoint
      log                                      Run > GRPO         the metrics row

TRL makes the pass for log-probabilities of its own only where its loss needs one; `_measured` makes one otherwise, and
only if the baseline declares that it needs it, or token weights do; where it can, the loss takes that pass instead of
one of its own (`lean_steps`). The state of what learns, a baseline or the mean of running weights, goes into every
checkpoint beside the optimizer's. otb/seams.py lists every private name of TRL that this relies on.

Methods beside the baseline, each off unless asked for, live in files of their own and touch the step in one place:
`lr_schedule` (otb/schedules.py) sees the lengths in `_log_rollouts`; `token_weights` (otb/token_weights.py) multiply
the advantages; `improvement` (otb/improvement.py) weighs what `_improve` does with them a step later; `auxiliary`
(otb/mtp_training.py) adds the loss of a head of its own; `sampler_dtype` (otb/sampler_copy.py) samples in the place of
vLLM; otb/mismatch.py measures what a sampler's numbers differ by, wherever they are known.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from accelerate.utils import set_seed
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from otb import adapters, baselines, exact_norms
from otb.advantages import advantages as advantages_of
from otb.auxiliary import MultiTokenPrediction, refuse_auxiliary, refuse_both
from otb.baselines.otb import otb
from otb.gradient_noise import GradientNoise
from otb.improvement import PolicyImprovement
from otb.lean_sampling import lean_sampling
from otb.loss_inputs import response_mask
from otb.measuring_trainer import MeasuringTrainer
from otb.metrics import advantage_metrics, energy_metrics, length_metrics, reward_metrics, token_weight_metrics
from otb.mismatch import mismatch_metrics
from otb.mtp_training import MTPTraining
from otb.options import (
    Batches,
    refuse_band,
    refuse_broken_groups,
    refuse_generation,
    refuse_improvement,
    refuse_options,
    refuse_sampler_dtype,
)
from otb.random_state import isolated_random_state
from otb.rollouts import OwnTokens, RolloutGroups
from otb.sampler_copy import SamplerCopy
from otb.schedules import LengthTriggeredDecay
from otb.token_weights import TokenWeights, refuse_without_base

BASELINE_STATE = "baseline.pt"  # the file in a checkpoint that holds the state of a baseline that learns
TOKEN_WEIGHTS_STATE = "token_weights.pt"  # and of token weights with normalise="running"
MTP_HEAD = "mtp_head.pt"  # and the weights of an auxiliary head


class _SingleRollout(int):
    """A group size of 1 that passes TRL's check `num_generations < 2` and counts as 1 everywhere else."""

    def __lt__(self, other: int) -> bool:
        return False


@dataclass
class OTBConfig(GRPOConfig):
    """TRL's GRPOConfig with a few more fields and two other rules.

    `num_generations=1` is allowed: the baseline declares the smallest group that makes sense. `scale_rewards` is
    "none": what divides an advantage belongs to the baseline (`grpo` divides, `otb` does not).

    Raises:
        ValueError: `scale_rewards` is anything else.
    """

    scale_rewards: str = "none"
    log_energy: bool = field(
        default=False, metadata={"help": "Log energy metrics also for baselines that do not need score norms."}
    )
    measure_gradient_noise: bool = field(
        default=False,
        metadata={"help": "Log the gradient noise measured on micro-batches of whole groups, and energy metrics."},
    )

    rows_per_generation: int | None = field(
        default=None,
        metadata={"help": "Rollouts that transformers' generate samples at a time; None: all of a turn."},
    )
    lean_steps: bool = field(
        default=True,
        metadata={
            "help": "Leave out what changes a step by rounding alone: padding, a second forward, backwards of 0 "
            "(otb/lean_trainer.py), rollouts that have ended (otb/lean_sampling.py; other random numbers, the same "
            "distribution). False: every pass as TRL makes it."
        },
    )
    geometric_ratio_band: tuple[float, float] | None = field(
        default=None,
        metadata={
            "help": "Drop a rollout where the geometric mean over own tokens of trained / sampled probability leaves "
            "(low, high): Geo-RS of the paper's 14B runs. Needs the sampler's log-probs: vLLM, or sampler_dtype."
        },
    )
    sampler_dtype: str | None = field(
        default=None,
        metadata={
            "help": "Precision of a copy of the policy that samples, 'bfloat16'; its importance ratios are "
            "those of the vllm_importance_sampling_* options. None: the policy samples itself."
        },
    )

    def __post_init__(self):
        if self.num_generations == 1:
            self.num_generations: int = _SingleRollout(1)
        super().__post_init__()
        self.num_generations = int(self.num_generations)
        if self.scale_rewards != "none":
            raise ValueError(
                f"scale_rewards={self.scale_rewards!r} divides advantages after the baseline; OTBConfig leaves scaling "
                "to the baseline. Use scale_rewards='none', and baseline=grpo for division by the group's deviation."
            )


class OTBTrainer(MeasuringTrainer):
    """A drop-in for `trl.GRPOTrainer` whose advantages come from `baseline`.

    Args:
        baseline: A function or object of the contract in `otb.baselines`; the paper's token baseline by default. One
            that carries state is copied, so that no other trainer learns with it: `trainer.baseline` is the copy.
        lr_schedule: What the learning rate is multiplied by over the steps, an `otb.schedules.LengthTriggeredDecay`; it
            is copied, too. None: as `args.lr_scheduler_type` says.
        token_weights: What multiplies the advantages token by token (otb/token_weights.py), copied too; None: nothing.
        improvement: Weighs a second update on the batch before (otb/improvement.py), copied too; None: no such update.
        auxiliary: A multi-token-prediction head that is trained beside the policy, and what of its loss reaches the
            policy (otb/auxiliary.py); None: no head.
        args: An OTBConfig. A plain GRPOConfig works too; its `scale_rewards` then has no effect.
        Everything else is as in `trl.GRPOTrainer`.

    Raises:
        ValueError: An option makes no sense with the baseline; raised before the model is loaded.
    """

    _tag_names = ["trl", "otb"]
    _buffered_inputs: list[dict] | None  # TRL's micro-batches of the last generation
    _name = "OTB"
    lr_scheduler: Any

    def __init__(
        self,
        model,
        reward_funcs=None,
        args=None,
        *positional,
        baseline: Callable = otb,
        lr_schedule: LengthTriggeredDecay | None = None,
        token_weights: TokenWeights | None = None,
        improvement: PolicyImprovement | None = None,
        auxiliary: MultiTokenPrediction | None = None,
        **kwargs,
    ):
        self.lr_schedule = copy.deepcopy(lr_schedule)
        self.token_weights = copy.deepcopy(token_weights)
        self.improvement = copy.deepcopy(improvement)
        self.baseline: Any = copy.deepcopy(baseline) if baselines.carries_state(baseline) else baseline
        self._needs = baselines.needs_of(baseline)
        self._noise = GradientNoise() if getattr(args, "measure_gradient_noise", False) else None
        logs_energy = self._noise is not None or getattr(args, "log_energy", False)
        self._needs_score_norms = "score_norms" in self._needs or logs_energy
        given = inspect.signature(GRPOTrainer).bind_partial(model, reward_funcs, args, *positional, **kwargs).arguments
        self._refuse_before_loading(given, auxiliary)
        self._sampled_tokens: Tensor | None = None  # (B, 2): own tokens; own and tool tokens
        self._mtp: MTPTraining | None = None
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if self.use_vllm:  # its engine has seeded this process with its own number, the same for every run
            set_seed(self.args.seed, device_specific=True)
        self._refuse_loaded(auxiliary)
        if getattr(self.args, "sampler_dtype", None) is not None:
            self._sample_by_copy(self.args.sampler_dtype)
        if auxiliary is not None:
            self._mtp = MTPTraining(auxiliary, self, self._causal_model())
            self.add_callback(self._mtp)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        keep_float32_outputs(self.accelerator)  # before TRL wraps the reference model

    def _refuse_before_loading(self, given: dict[str, Any], auxiliary: MultiTokenPrediction | None) -> None:
        """Raises ValueError for what options alone show. given: arguments of GRPOTrainer by name."""
        args, baseline, model = given["args"], self.baseline, given["model"]
        refuse_both(self.improvement, auxiliary)
        if args is not None:
            needs_scores = self._needs_score_norms or baselines.needs_scores(baseline)
            refuse_options(args, baseline, needs_scores, self.token_weights is not None)
            refuse_sampler_dtype(args)
            refuse_band(args)
            if self.improvement is not None:
                refuse_improvement(args)
            if self.lr_schedule is not None:
                refuse_two_schedules(args, given.get("optimizers"))
            if auxiliary is not None:
                refuse_auxiliary(args, auxiliary, given.get("peft_config"), given.get("optimizers"))
            if self._noise:
                refuse_micro_batches(args)
        if self.token_weights is not None and self.token_weights.reads_base:
            adapter = getattr(model, "active_peft_config", None) or given.get("peft_config")
            refuse_without_base(self.token_weights.signal, adapter)

    def _refuse_loaded(self, auxiliary: MultiTokenPrediction | None) -> None:
        """Raises ValueError for what only the model, or how it is spread over processes, shows."""
        baseline, weights = self.baseline, self.token_weights
        if weights is not None and weights.reads_base:
            adapters.refuse_trained_base(weights.signal, self.accelerator.unwrap_model(self.model))
            with self._hidden_states(weights.states):  # a backbone without a final norm is refused
                pass
        if (self._needs_score_norms or baselines.needs_scores(baseline)) and not self.use_vllm:
            refuse_generation(self.model.generation_config.to_dict(), "the model's generation_config.json")
        if auxiliary is not None:
            refuse_auxiliary(self.args, auxiliary, getattr(self.model, "peft_config", None))
            self._refuse_sharding("auxiliary=", "auxiliary=None")
        if self._needs & baselines.EXACT_NORMS:
            exact_norms.trainable(self.model)  # too many parameters are refused before the first rollout
            self._refuse_sharding(f"baseline {baselines.name_of(baseline)}", "a baseline with the proxy")
        if self._noise:
            self._refuse_sharding("measure_gradient_noise=True", "measure_gradient_noise=False")
        if self.improvement is not None:
            self._refuse_sharding("improvement=", "improvement=None")

    def _refuse_sharding(self, option: str, instead: str) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                f"{option} needs whole parameters and their gradients on every process; FSDP and DeepSpeed shard them. "
                f"Use plain data parallelism, or {instead}."
            )

    def _sample_by_copy(self, dtype: str) -> None:
        """Puts a copy of the policy where TRL keeps vLLM: from here on it weighs what differs as it does for vLLM."""
        self._refuse_sharding(f"sampler_dtype={dtype}", "sampler_dtype=None")
        reader = ("the sampler's log-probs", "sampler_dtype=None")
        refuse_generation(self.model.generation_config.to_dict(), "the model's generation_config.json", reader=reader)
        self.vllm_generation = SamplerCopy(
            self.accelerator.unwrap_model(self.model),
            self._causal_model(),
            getattr(torch, dtype),
            self.generation_config,
            self.eos_token_ids,
            getattr(self.args, "rows_per_generation", None),
        )
        self.use_vllm, self.vllm_mode, self._last_loaded_step = True, "server", -1  # a server's context is the model's

    # ---- rollouts -> advantages

    def _generate_and_score_completions(self, inputs):
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        of_sampling = self._mtp is not None and self._mtp.options.reads_old_head
        with self._measurable_passes():
            with self._mtp.passes_of("sampling") if self._mtp and of_sampling else nullcontext():
                output = super()._generate_and_score_completions(inputs)
            if self._mtp is not None:
                self._mtp.keep_old(output)
            started = time.perf_counter()
            self._replace_advantages(output)
            self._add_seconds("advantages", time.perf_counter() - started)
        return output

    def _replace_advantages(self, output: dict) -> None:
        """Puts the baseline's advantages, (B,) or (B, C), in the place of TRL's group-mean ones (B,)."""
        sampled_mask = response_mask(output)
        if (band := getattr(self.args, "geometric_ratio_band", None)) is not None:
            self._drop_mismatched(output, *band)
        own = OwnTokens(response_mask(output))
        rollouts = self._gathered_groups(own, **self._measured(output, own))
        if output.get("sampling_per_token_logps") is not None:
            self._log_mismatch(output, OwnTokens(sampled_mask))
        baseline = self.baseline(rollouts)
        advantages = advantages_of(rollouts, baseline)  # (P, G, T) or (P, G, 1)
        if advantages.shape[-1] > 1 and not baselines.is_per_token(self.baseline):
            raise ValueError(
                f"baseline {baselines.name_of(self.baseline)} returned one value per token and has not declared it, so "
                "that options which need one per rollout were not refused. Declare it: @declare(per_token=True)."
            )
        if self.token_weights is not None:
            advantages = advantages * self._gathered_factors(self.token_weights, rollouts)

        local = slice(self.accelerator.process_index * len(own.mask), None)
        packed = advantages.flatten(0, 1)[local][: len(own.mask)]  # (B, T or 1): groups may span processes
        per_rollout = advantages.shape[-1] == 1
        output["advantages"] = packed[:, 0] if per_rollout else own.unpack(packed[:, : own.width])
        if self._noise:
            self._noise.number_rows(output)
        self._log_rollouts(rollouts, baseline, advantages, output)
        if self.improvement is not None:
            known = output.get("old_per_token_logps", self._log_probs)
            log_probs = self._extra_pass(output)[0] if known is None else known
            self._keep_for_improvement(output, rollouts, advantages, log_probs)
        if baselines.carries_state(self.baseline):
            self.baseline.update(rollouts)

    def _gathered_factors(self, weights: TokenWeights, rollouts: RolloutGroups) -> Tensor:
        """Returns the factors of all processes, (P, G, T or 1), logs them and lets the weights learn."""
        factors = self._gathered(cast(Tensor, self._factors))
        signals = None if self._signals is None else self._gathered(self._signals)
        own = rollouts.reached(factors.shape[-1])
        self._log(token_weight_metrics(signals, factors, own))
        if signals is not None:
            weights.update(signals, own)
        return factors

    def _generate_single_turn(self, prompt_ids, images, *args, **kwargs):
        was_training = self.model.training
        try:
            return self._generate_in_parts(prompt_ids, images, *args, **kwargs)
        finally:
            self.model.train(was_training)  # TRL's continuous batching leaves it training, even within an evaluation

    def _generate_in_parts(self, prompt_ids, images, *args, **kwargs):
        if self.use_vllm or images is not None:
            return super()._generate_single_turn(prompt_ids, images, *args, **kwargs)
        at_once = getattr(self.args, "rows_per_generation", None) or len(prompt_ids)
        completion_ids: list = []
        with self._lean_sampling():
            for first in range(0, len(prompt_ids), at_once):  # generate returns no log-probs
                chunk = prompt_ids[first : first + at_once]
                completion_ids += super()._generate_single_turn(chunk, images, *args, **kwargs)[0]
        return completion_ids, None

    def _lean_sampling(self) -> AbstractContextManager:
        if not getattr(self.args, "lean_steps", False) or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return nullcontext()
        return lean_sampling(self.accelerator.unwrap_model(self.model))

    def _drop_mismatched(self, output: dict, low: float, high: float) -> None:
        """Takes the rollouts of which the geometric mean ratio leaves the band out of the loss and of all sums.

        They keep their reward in the baselines that read rewards alone, as masked truncated rollouts do.
        """
        outside = outside_band(output, low, high)
        output["completion_mask"] = output["completion_mask"] * ~outside.unsqueeze(1)
        # What dapo, cispo and vespo divide by. TRL does not count the truncated rollouts that it masks, either.
        output["num_items_in_batch"] = self.accelerator.gather(response_mask(output).sum()).sum()
        share = self.accelerator.gather(outside.float()).mean().item()
        self._metrics["train"]["dropped_by_mismatch"].append(share)

    def _log_mismatch(self, output: dict, own: OwnTokens) -> None:
        """Logs how far the policy is from its sampler, over the rollouts of all processes.

        own: of all rollouts, those of `_drop_mismatched` too. It takes a forward where the policy's log-probs are not
        known yet, as without TRL's correction, or from TRL's pass alone, whose dropout is no difference of the sampler.
        Nothing is logged where that forward would not see a prompt's images.
        """
        trained = self._log_probs
        if trained is None or (self._is_noisy and trained is output.get("old_per_token_logps")):
            if "pixel_values" in output:
                return
            trained = self._log_probs = self._extra_pass(output)[0]
        ratio = self._gathered(own.pack(trained - output["sampling_per_token_logps"])).flatten(0, 1)
        lengths = self._gathered(own.lengths).flatten()
        alive = torch.arange(ratio.size(1), device=ratio.device) < lengths.unsqueeze(1)
        self._log(mismatch_metrics(ratio, alive))

    def _state_of_engine(self) -> AbstractContextManager[None]:
        """Gives the processes that share a copy of the policy in vLLM one random state, from which each samples.

        Each of them draws all tokens of all of them; with other tokens they would wait for each other forever. The
        state follows from that of the first of them, which is in the checkpoints.
        """
        together = self.vllm_tensor_parallel_size if self.use_vllm and self.vllm_mode == "colocate" else 1
        if together == 1:
            return nullcontext()
        drawn = self.accelerator.gather(torch.randint(2**62, (1,), device=self.accelerator.device)).tolist()
        rank = self.accelerator.process_index
        return isolated_random_state(seed=drawn[rank - rank % together])

    def _generate(self, prompts):
        started = time.perf_counter()
        with self._state_of_engine():
            generated = super()._generate(prompts)
        _, completion_ids, tool_mask, *_ = generated
        lengths = [len(ids) for ids in completion_ids]
        own_counts = lengths if tool_mask is None else [sum(mask) for mask in tool_mask]
        # Counted here: TRL masks truncated rollouts later, and tokens that were sampled were paid for.
        self._sampled_tokens = torch.tensor([own_counts, lengths], device=self.accelerator.device).T.contiguous()
        self._add_seconds("sampling", time.perf_counter() - started)
        return generated

    # ---- gradient noise, from micro-batches of whole prompt groups

    def _prepare_inputs(self, generation_batch):
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._noise and self.model.training:
            if self._buffered_inputs is not before:  # new rollouts, which TRL shuffled and cut into micro-batches
                self._buffered_inputs = self._noise.regroup(cast(list, self._buffered_inputs))
                inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
            self._noise.start(self.accelerator.unwrap_model(self.model), self.accelerator.device)
        return inputs

    # ---- the loss of an auxiliary head

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        part = (input_ids, attention_mask, logits_to_keep)
        if self._mtp is None or not self._mtp.is_to_see(model):
            return super()._get_per_token_logps_and_entropies(model, *part, *args, **kwargs)
        with self._mtp.reading(*part) as of_head:
            result = super()._get_per_token_logps_and_entropies(model, *part, *args, **kwargs)
        self._mtp.seen.append((result[0], torch.cat(of_head)))
        return result

    def _is_lean(self, batch: dict) -> bool:
        return super()._is_lean(batch) and self._mtp is None  # a head's loss reads every rollout

    def _compute_loss(self, model, inputs):
        if self._mtp is None or not self.model.training:
            return super()._compute_loss(model, inputs)
        with self._mtp.passes_of("loss"):
            loss = super()._compute_loss(model, inputs)
            of_head, metrics = self._mtp.loss(inputs, response_mask(inputs))
        self._log(metrics)
        return loss + (of_head - of_head.detach())  # 0: what is logged as the loss stays the policy's

    def create_optimizer(self, *args, **kwargs):
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        if self._mtp is not None and is_new:
            self._mtp.add_to(optimizer, self.args.weight_decay)
        return optimizer

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self._noise:
            self._noise.after_micro_batch()
        return loss

    def _get_grad_norm(self, *args, **kwargs):
        """Returns the norm of the gradient of all processes before clipping; asked once, before an optimizer step."""
        norm = super()._get_grad_norm(*args, **kwargs)
        if self._mtp is not None and not math.isfinite(of_head := self._mtp.finish_gradients()):
            norm = of_head  # which a run refuses
        if self._noise:
            metrics, rollouts = self._metrics["train"], self.args.per_device_train_batch_size
            verl_power = metrics["verl_power"][-1] if "verl_power" in metrics else None
            gather = self.accelerator.gather
            self._log(self._noise.measured(float(norm), rollouts, self.num_generations, verl_power, gather))
        return norm

    # ---- what is logged

    def _log_rollouts(self, rollouts, baseline, advantages: Tensor, output: dict) -> None:
        own_tokens, all_tokens = self.accelerator.gather(self._sampled_tokens).T
        metrics = length_metrics(own_tokens) | reward_metrics(rollouts)
        metrics |= advantage_metrics(rollouts, baseline, advantages)
        if self._needs_score_norms:
            before_weights = advantages if self.token_weights is None else advantages_of(rollouts, baseline)
            metrics |= energy_metrics(rollouts, before_weights)  # whose factors are in the score norms
        if "tool_mask" in output:
            metrics["tool_tokens"] = int((all_tokens - own_tokens).sum())
        if len(self.reward_funcs) > 1 or self.reward_weights[0] != 1:
            metrics.pop("accuracy", None)  # a weighted sum is no grade
        self._log(metrics)
        if self.lr_schedule is not None:
            self._observe_lengths(metrics["response_length_mean"])
        # TRL's completions table would show the advantages of its own baseline: show the mean of those in use.
        counts = rollouts.lengths.flatten().clamp(min=1) if advantages.shape[-1] > 1 else 1
        for _ in range(rollouts.rewards.numel()):
            self._logs["advantages"].pop()
        self._logs["advantages"].extend((advantages.flatten(0, 1).sum(-1) / counts).tolist())

    def _log(self, metrics: dict[str, float]) -> None:
        """Hands metrics of the step to TRL, which logs their mean over the passes since the last log."""
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    # ---- a learning rate that follows the lengths

    def create_scheduler(self, num_training_steps, optimizer=None):
        if self.lr_schedule is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        # LambdaLR keeps the attributes of a callable object in its state, and so the checkpoints do.
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.lr_schedule)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _observe_lengths(self, mean_length: float) -> None:
        schedule = cast(LengthTriggeredDecay, self.lr_schedule)
        known = schedule.baseline is not None
        schedule.observe(self.state.global_step, mean_length)
        self._log(schedule.metrics())
        if known or schedule.baseline is None or not self.accelerator.is_main_process:
            return
        if schedule.out_of_reach(self.max_completion_length):
            warnings.warn(
                f"responses begin with {schedule.baseline:.1f} tokens, and {schedule.ratio:g} times as many are not "
                f"below max_completion_length={self.max_completion_length}: no surge can be seen, and the learning "
                "rate stays. Use a smaller ratio, or a fixed_period.",
                stacklevel=2,
            )

    # ---- the state of what learns, in every checkpoint beside the optimizer's

    def _save_optimizer_and_scheduler(self, output_dir) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:  # all processes hold the same
            for file, learner in self._learners().items():
                torch.save(learner.state_dict(), os.path.join(output_dir, file))

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        for name, learner in self._learners().items() if checkpoint is not None else ():
            file = os.path.join(checkpoint, name)
            if not os.path.exists(file):
                raise ValueError(
                    f"{checkpoint} has no {name}, and {baselines.name_of(learner)} goes on from the state of earlier "
                    "steps. Resume from a checkpoint of a run with it, or start anew."
                )
            learner.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))

    def _learners(self) -> dict[str, Any]:
        """Returns what carries state from step to step, by the file in a checkpoint that holds it."""
        learners: dict[str, Any] = {BASELINE_STATE: self.baseline} if baselines.carries_state(self.baseline) else {}
        if self.token_weights is not None and self.token_weights.normalise == "running":
            learners[TOKEN_WEIGHTS_STATE] = self.token_weights
        if self._mtp is not None:
            learners[MTP_HEAD] = self._mtp.head
        return learners

    # ---- evaluation leaves the training trajectory alone

    def evaluate(self, *args, **kwargs):
        with isolated_random_state():
            return super().evaluate(*args, **kwargs)


def outside_band(output: dict, low: float, high: float) -> Tensor:
    """Tells of which rollouts the geometric mean of trained / sampled probability is outside [low, high]. -> (B,) bool.

    output: what TRL hands from scoring to the loss, with the log-probs of the policy and of the sampler. A token that
    the sampler gave no log-prob (NaN) counts as equal.
    """
    own = response_mask(output)
    difference = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).nan_to_num(0.0) * own
    mean = difference.sum(1) / own.sum(1).clamp(min=1)
    return (mean < math.log(low)) | (mean > math.log(high))


def keep_float32_outputs(accelerator) -> None:
    """Lets FSDP2 compute in bfloat16 but hand out the log-probs in float32, and reduce gradients in float32.

    accelerate's own policy casts what the model returns to bfloat16: eight bits of a log-prob make importance ratios
    and score norms near pi = 1 wrong. Call it before the model is wrapped. Nothing happens without FSDP2 and bfloat16.
    """
    if not accelerator.is_fsdp2 or accelerator.mixed_precision != "bf16":
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy

    accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )


def refuse_two_schedules(args: GRPOConfig, optimizers: tuple | None) -> None:
    """Raises ValueError where something beside `lr_schedule` would move the learning rate."""
    given = f"lr_scheduler_type={str(getattr(args.lr_scheduler_type, 'value', args.lr_scheduler_type))!r}"
    if optimizers is not None and optimizers[1] is not None:
        given = f"optimizers=(..., {type(optimizers[1]).__name__})"
    elif given == "lr_scheduler_type='constant'":
        return
    raise ValueError(
        f"{given} and lr_schedule would both set the learning rate. Use lr_scheduler_type='constant' and no scheduler "
        "in optimizers; the schedule has a warmup of its own. Or leave lr_schedule out."
    )


def refuse_micro_batches(args: GRPOConfig) -> None:
    """Raises ValueError where a step has no two micro-batches of whole prompt groups to measure gradient noise on."""
    if args.fp16:
        raise ValueError("measure_gradient_noise=True reads gradients, which fp16=True scales. Use bf16=True.")
    forward, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    refuse_broken_groups(
        Batches(forward * accumulation, forward, accumulation),
        args.num_generations,
        args.world_size,
        fix="Set per_device_train_batch_size to a multiple of num_generations and gradient_accumulation_steps to 2 or "
        "more.",
    )
