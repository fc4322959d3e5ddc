"""OTBTrainer: TRL's GRPOTrainer with advantages from any baseline of `otb.baselines`.

One subclass, nothing copied. TRL calls the methods below in the order in which they stand; `_advantages` is the step
itself. What stands beside the baseline is a `Method` (otb/methods/__init__.py) in `self.methods`; `self.passes` makes
and reads forwards before the loss, `self.lean` leaves out of the loss what has no gradient.
"""

from __future__ import annotations

import copy
import inspect
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from accelerate.utils import set_seed
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from otb import baselines, exact_norms
from otb.advantages import advantages as advantages_of
from otb.baselines.otb import otb
from otb.loss_inputs import response_mask
from otb.methods import Method, Step
from otb.methods.auxiliary import MultiTokenPrediction
from otb.methods.auxiliary_head import AuxiliaryHead
from otb.methods.gradient_noise import GradientNoise
from otb.methods.improvement import PolicyImprovement
from otb.methods.improvement_update import ImprovementUpdate
from otb.methods.mismatch import SamplerMismatch
from otb.methods.sampler_copy import SamplerCopy
from otb.methods.schedules import FollowedLengths, LengthTriggeredDecay
from otb.methods.token_weights import TokenWeights, WeightedAdvantages
from otb.metrics import advantage_metrics, energy_metrics, length_metrics, reward_metrics
from otb.random_state import isolated_random_state
from otb.refusals import Options
from otb.rollouts import OwnTokens, RolloutGroups
from otb.training.lean_loss import LeanLoss
from otb.training.lean_sampling import lean_sampling
from otb.training.options import refuse, refuse_generation_config
from otb.training.passes import Passes

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
            "(lean_loss.py), rollouts that have ended (lean_sampling.py; other random numbers, the same "
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


class OTBTrainer(GRPOTrainer):
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
    words = Options  # of whoever is refused
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
        self.lr_schedule, self.improvement = copy.deepcopy(lr_schedule), copy.deepcopy(improvement)
        self.token_weights = copy.deepcopy(token_weights)
        self.baseline: Any = copy.deepcopy(baseline) if baselines.carries_state(baseline) else baseline
        measures_noise = getattr(args, "measure_gradient_noise", False)
        self._noise = measures_noise
        self.passes = Passes(self.baseline, self.token_weights, measures_noise or getattr(args, "log_energy", False))
        self._needs_score_norms = self.passes.needs_score_norms
        self.lean = LeanLoss()
        self.methods: list[Method] = [  # in this order at every moment of the step; the innermost of a pass first
            *([ImprovementUpdate(self.improvement)] if self.improvement else []),
            self.lean,
            self.passes,
            SamplerMismatch(),
            *([WeightedAdvantages(self.token_weights)] if self.token_weights else []),
            *([FollowedLengths(self.lr_schedule)] if self.lr_schedule else []),
            *([GradientNoise()] if measures_noise else []),
            *([AuxiliaryHead(auxiliary)] if auxiliary else []),
        ]
        given = inspect.signature(GRPOTrainer).bind_partial(model, reward_funcs, args, *positional, **kwargs).arguments
        self.asked = self._asked(given, auxiliary)
        refuse(self.asked)
        self._seconds: dict[str, float] = {}  # part of the step -> time spent in it
        self._rewards_per_function: Tensor | None = None  # (P * G, reward functions), of all processes
        self._sampled_tokens: Tensor | None = None  # (B, 2): own tokens; own and tool tokens
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if self.use_vllm:  # its engine has seeded this process with its own number, the same for every run
            set_seed(self.args.seed, device_specific=True)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # the launcher may have said so
            self.asked = self.asked.but(sharded=True)
            refuse(self.asked)
        if not self.use_vllm:
            refuse_generation_config(self.asked, self.model.generation_config.to_dict())
        for method in self.methods:
            method.attach(self)
        if getattr(self.args, "sampler_dtype", None) is not None:
            self._sample_by_copy(self.args.sampler_dtype)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        keep_float32_outputs(self.accelerator)  # before TRL wraps the reference model

    def _asked(self, given: dict[str, Any], auxiliary: MultiTokenPrediction | None) -> Options:
        """Returns the options as refusals read them. given: arguments of GRPOTrainer by name."""
        args = given["args"]
        return self.words(
            args,
            baseline=self.baseline,
            lr_schedule=self.lr_schedule,
            token_weights=self.token_weights,
            improvement=self.improvement,
            auxiliary=auxiliary,
            peft_config=getattr(given["model"], "active_peft_config", None) or given.get("peft_config"),
            optimizers=given.get("optimizers"),
            sharded=bool(getattr(args, "fsdp", None) or getattr(args, "deepspeed", None)),
        )

    def _sample_by_copy(self, dtype: str) -> None:
        """Puts a copy of the policy where TRL keeps vLLM: from here on it weighs what differs as it does for vLLM."""
        self.vllm_generation = SamplerCopy(
            self.accelerator.unwrap_model(self.model),
            self._causal_model(),
            getattr(torch, dtype),
            self.generation_config,
            self.eos_token_ids,
            getattr(self.args, "rows_per_generation", None),
        )
        self.use_vllm, self.vllm_mode, self._last_loaded_step = True, "server", -1  # a server's context is the model's

    # ---- the step, in the order in which TRL calls it

    def _prepare_inputs(self, generation_batch):
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)  # makes new rollouts where they are due
        if not self.model.training:
            return inputs
        if self._buffered_inputs is not before:  # TRL has cut new rollouts into micro-batches
            batches = cast(list, self._buffered_inputs)
            for method in self.methods:
                batches = method.batches(batches)
            self._buffered_inputs = batches
            inputs = batches[self._step % self.args.steps_per_generation]
        for method in self.methods:
            method.before_micro_batch()
        return inputs

    def _generate_and_score_completions(self, inputs):
        self.lean.forget()
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        with self.passes.recording():
            with ExitStack() as stack:
                for method in self.methods:
                    stack.enter_context(method.while_sampling())
                output = super()._generate_and_score_completions(inputs)
            started = time.perf_counter()
            self._replace_advantages(output)
            self._add_seconds("advantages", time.perf_counter() - started)
        return output

    def _replace_advantages(self, output: dict) -> None:
        """Puts the baseline's advantages, (B,) or (B, C), in the place of TRL's group-mean ones (B,)."""
        for method in self.methods:
            method.begin(output)
        step = Step(output, OwnTokens(response_mask(output)))
        step.rollouts = self._gathered_groups(step.own, **self.passes.measure(step))
        for method in self.methods:
            method.measured(step)
        step.baseline = self.baseline(step.rollouts)
        step.advantages = advantages_of(step.rollouts, step.baseline)  # (P, G, T) or (P, G, 1)
        refuse_undeclared(self.baseline, step.advantages)
        for method in self.methods:
            method.weighed(step)
        output["advantages"] = self._of_this_process(step.advantages, step.own)
        self._log_rollouts(step)
        for method in self.methods:
            method.finish(step)
        if baselines.carries_state(self.baseline):
            self.baseline.update(step.rollouts)

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

    def _calculate_rewards(self, *args, **kwargs):
        started = time.perf_counter()
        self._rewards_per_function = super()._calculate_rewards(*args, **kwargs)
        self._add_seconds("scoring", time.perf_counter() - started)
        return self._rewards_per_function

    def _get_per_token_logps_and_entropies(self, model, *part, **kwargs):
        return self.passed(model, *part, **kwargs)

    def passed(self, model, *part, below: Method | None = None, **kwargs):
        """Makes a pass through all methods, the innermost first. below: only through those inside this one."""
        make = super()._get_per_token_logps_and_entropies
        for layer in self.methods:
            if layer is below:
                break
            make = partial(layer.around_pass, make)
        return make(model, *part, **kwargs)

    def _compute_loss(self, model, inputs):
        make = super()._compute_loss
        for layer in self.methods:
            make = partial(layer.around_loss, make)
        return make(model, inputs)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        for method in self.methods:
            method.after_micro_batch()
        return loss

    def _get_grad_norm(self, *args, **kwargs):
        """Returns the norm of the gradient of all processes before clipping; asked once, before an optimizer step."""
        norm = super()._get_grad_norm(*args, **kwargs)
        for method in self.methods:
            norm = method.gradient(norm)
        return norm

    def create_optimizer(self, *args, **kwargs):
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        for method in self.methods if is_new else ():
            method.add_to(optimizer, self.args.weight_decay)
        return optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        if self.lr_schedule is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        # LambdaLR keeps the attributes of a callable object in its state, and so the checkpoints do.
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.lr_schedule)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    @property
    def _mtp(self) -> AuxiliaryHead | None:
        return next((method for method in self.methods if isinstance(method, AuxiliaryHead)), None)

    # ---- rollouts of all processes

    def _summed_rewards(self) -> Tensor:
        """Returns the weighted sums of the reward functions, (P * G,) of all processes; NaN for unscored rollouts."""
        assert self._rewards_per_function is not None, "rewards come before their sums"
        weights = self.reward_weights.to(self._rewards_per_function.device)
        rewards = (self._rewards_per_function * weights).nansum(dim=1)
        return rewards.masked_fill(self._rewards_per_function.isnan().all(dim=1), torch.nan)

    def _gathered_groups(self, own: OwnTokens, totals: dict, reduced: dict, **measured: Tensor) -> RolloutGroups:
        """Returns the prompt groups of all processes, from what each of them measured.

        reduced, measured: rows (B, ...) of this process; totals: tensors of any shape, which are summed.
        """
        lengths = self._gathered(own.lengths)
        measured = {name: self._gathered(rows) for name, rows in measured.items()}
        if "prefix_norms" in measured:  # another process's rollouts may be longer
            measured["prefix_norms"] = exact_norms.kept_after_end(measured["prefix_norms"], lengths)
        return RolloutGroups(
            rewards=self._in_groups(self._summed_rewards()),
            lengths=lengths,
            reduced={name: self._gathered(rows) for name, rows in reduced.items()},
            totals={name: self.accelerator.reduce(total, reduction="sum") for name, total in totals.items()},
            **measured,
        )

    def _gathered(self, rows: Tensor) -> Tensor:
        """Collects rows of all processes. (B, ...) -> (P, G, ...); a second dimension that differs is padded with 0."""
        if rows.dim() > 1:
            rows = self.accelerator.pad_across_processes(rows, dim=1)
        return self._in_groups(self.accelerator.gather(rows))

    def _in_groups(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, self.num_generations))

    def _of_this_process(self, advantages: Tensor, own: OwnTokens) -> Tensor:
        """Returns advantages as TRL's loss takes them. (P, G, T or 1) of all processes -> (B, C) or (B,)."""
        local = slice(self.accelerator.process_index * len(own.mask), None)
        packed = advantages.flatten(0, 1)[local][: len(own.mask)]  # (B, T or 1): groups may span processes
        return packed[:, 0] if advantages.shape[-1] == 1 else own.unpack(packed[:, : own.width])

    def _causal_model(self):
        """Returns the transformers model with the LM head, beneath what wraps it for several processes or for LoRA."""
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    # ---- what is logged

    def _log_rollouts(self, step: Step) -> None:
        rollouts, advantages, output = step.rollouts, step.advantages, step.output
        own_tokens, all_tokens = self.accelerator.gather(self._sampled_tokens).T
        metrics = length_metrics(own_tokens) | reward_metrics(rollouts)
        metrics |= advantage_metrics(rollouts, step.baseline, advantages)
        if self._needs_score_norms:
            before_weights = advantages if step.factors is None else advantages_of(rollouts, step.baseline)
            metrics |= energy_metrics(rollouts, before_weights)  # whose factors are in the score norms
        if "tool_mask" in output:
            metrics["tool_tokens"] = int((all_tokens - own_tokens).sum())
        if len(self.reward_funcs) > 1 or self.reward_weights[0] != 1:
            metrics.pop("accuracy", None)  # a weighted sum is no grade
        self._log(metrics)
        # TRL's completions table would show the advantages of its own baseline: show the mean of those in use.
        counts = rollouts.lengths.flatten().clamp(min=1) if advantages.shape[-1] > 1 else 1
        for _ in range(rollouts.rewards.numel()):
            self._logs["advantages"].pop()
        self._logs["advantages"].extend((advantages.flatten(0, 1).sum(-1) / counts).tolist())

    def _log(self, metrics: dict[str, float]) -> None:
        """Hands metrics of the step to TRL, which logs their mean over the passes since the last log."""
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _add_seconds(self, part: str, seconds: float) -> None:
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    # ---- the state of what learns, in every checkpoint beside the optimizer's

    def _save_optimizer_and_scheduler(self, output_dir) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:  # all processes hold the same
            for file, learner in self._learners().items():
                torch.save(learner.state_dict(), os.path.join(output_dir, file))
        for method in self.methods:
            method.save(output_dir)

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
        for method in self.methods if checkpoint is not None else ():
            method.load(checkpoint)

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


def refuse_undeclared(baseline: Callable, advantages: Tensor) -> None:
    """Raises ValueError for a baseline that returns a value per token and has not declared it."""
    if advantages.shape[-1] > 1 and not baselines.is_per_token(baseline):
        raise ValueError(
            f"baseline {baselines.name_of(baseline)} returned one value per token and has not declared it, so "
            "that options which need one per rollout were not refused. Declare it: @declare(per_token=True)."
        )


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
