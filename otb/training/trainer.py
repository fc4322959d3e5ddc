"""Defines OTBTrainer: TRL's GRPOTrainer with advantages from any baseline of `otb.baselines`.

It is one subclass and copies no method of TRL. The section "the step" below is a training step, in TRL's order.
Everything besides the baseline is a `Method` (otb/methods/__init__.py) in `self.methods`. `passes` makes the forwards
that the baseline needs, and `lean` skips the parts of the loss that have no gradient; most other methods are off by
default. otb/seams.py lists every private name of TRL that this project relies on.
"""

from __future__ import annotations

import copy
import inspect
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from accelerate.utils import set_seed
from torch import Tensor
from trl import GRPOTrainer

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
from otb.methods.sampler_copy import CopySampling
from otb.methods.schedules import FollowedLengths, LengthTriggeredDecay
from otb.methods.token_weights import TokenWeights, WeightedAdvantages
from otb.methods.tool_rollouts import ToolRollouts
from otb.metrics import advantage_metrics, energy_metrics, length_metrics, reward_metrics
from otb.random_state import isolated_random_state
from otb.refusals import Options
from otb.rollouts import OwnTokens, RolloutGroups
from otb.training.config import OTBConfig
from otb.training.engine_state import EngineState
from otb.training.lean_loss import LeanLoss
from otb.training.lean_sampling import LeanSampling
from otb.training.options import refuse, refuse_generation_config
from otb.training.passes import Passes

__all__ = ["OTBConfig", "OTBTrainer"]
BASELINE_STATE = "baseline.pt"  # file in a checkpoint: the state of a baseline that learns


class OTBTrainer(GRPOTrainer):
    """Replaces `trl.GRPOTrainer`; its advantages come from `baseline`.

    Args:
        baseline: A function or object of the contract in `otb.baselines`; the paper's token baseline by default. A
            baseline with state is copied, so two trainers never share one: `trainer.baseline` is the copy.
        lr_schedule: Multiplies the learning rate over the steps, an `otb.methods.schedules.LengthTriggeredDecay`. The
            trainer copies it. None: `args.lr_scheduler_type` decides.
        token_weights: Multiplies the advantages token by token, an `otb.methods.token_weights.TokenWeights`. The
            trainer copies it. None: no weights.
        improvement: Weighs a second update on the previous batch, an `otb.methods.improvement.PolicyImprovement`. The
            trainer copies it. None: no such update.
        auxiliary: Describes a multi-token-prediction head that is trained with the policy, and how its loss acts on the
            policy, an `otb.methods.auxiliary.MultiTokenPrediction`. None: no head.
        methods: Further `Method`s (otb/methods/__init__.py), called after the trainer's own.
        args: An OTBConfig. A plain GRPOConfig works too; its `scale_rewards` then has no effect.
        All other arguments are as in `trl.GRPOTrainer`.

    Raises:
        ValueError: An option does not work with the baseline or with another option. Most of these errors are raised
            before the model is loaded.
    """

    _tag_names = ["trl", "otb"]
    _name = "OTB"
    words = Options  # the vocabulary of refusals: a script's, or a run's in RunTrainer
    _buffered_inputs: list[dict] | None  # TRL's micro-batches of the last generation
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
        methods: Sequence[Method] = (),
        **kwargs,
    ):
        self.baseline: Any = copy.deepcopy(baseline) if baselines.carries_state(baseline) else baseline
        self.lr_schedule, self.improvement = copy.deepcopy(lr_schedule), copy.deepcopy(improvement)
        self.token_weights = copy.deepcopy(token_weights)
        measures_noise = bool(getattr(args, "measure_gradient_noise", False))
        needs_score_norms = (
            "score_norms" in baselines.needs_of(baseline) or measures_noise or getattr(args, "log_energy", False)
        )
        given = inspect.signature(GRPOTrainer).bind_partial(model, reward_funcs, args, *positional, **kwargs).arguments
        self.asked = self._asked(given, auxiliary)
        refuse(self.asked)
        for method in methods:
            method.refuse(self.asked)
        self.passes = Passes(self.baseline, self.token_weights, needs_score_norms)
        self.lean, self.tool_rollouts = LeanLoss(), ToolRollouts()
        sampler_dtype = getattr(args, "sampler_dtype", None)
        self.methods: list[Method] = [  # called in this order; the first is the innermost
            *([ImprovementUpdate(self.improvement)] if self.improvement else []),
            self.lean,
            self.passes,
            SamplerMismatch(),
            *([WeightedAdvantages(self.token_weights)] if self.token_weights else []),
            *([FollowedLengths(self.lr_schedule)] if self.lr_schedule else []),
            *([GradientNoise()] if measures_noise else []),
            *([AuxiliaryHead(auxiliary)] if auxiliary else []),
            EngineState(),
            LeanSampling(),
            self.tool_rollouts,
            *([CopySampling(sampler_dtype)] if sampler_dtype else []),
            *methods,
        ]
        self.seconds: dict[str, float] = {}  # part of the step -> time spent in it
        self.endings: list[str] = []  # how each rollout of the last generation ended, one of ENDINGS
        self.sampled_tokens = torch.zeros(0, 2)  # (B, 2) of the last generation: own tokens; own and tool tokens
        self._rewards_per_function: Tensor | None = None  # (P * G, reward functions), of all processes
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if self.use_vllm:  # vLLM's engine has seeded this process with a fixed number
            set_seed(self.args.seed, device_specific=True)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # the launcher may have asked for it
            self.asked = self.asked.but(sharded=True)
            refuse(self.asked)
            for method in methods:
                method.refuse(self.asked)
        if not self.use_vllm:
            refuse_generation_config(self.asked, self.model.generation_config.to_dict())
        for method in self.methods:
            method.attach(self)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        keep_float32_outputs(self.accelerator)  # before TRL wraps the reference model

    def _asked(self, given: dict[str, Any], auxiliary: MultiTokenPrediction | None) -> Options:
        """Returns the options in the form that refusals read. given: arguments of GRPOTrainer by name."""
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

    # ---- the step

    def _prepare_inputs(self, generation_batch):
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)  # makes new rollouts if they are due
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
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        with ExitStack() as stack:
            for method in self.methods:
                stack.enter_context(method.while_sampling())
            output = super()._generate_and_score_completions(inputs)
        started = time.perf_counter()
        self._replace_advantages(output)
        self.add_seconds("advantages", time.perf_counter() - started)
        return output

    def _generate(self, prompts):
        started = time.perf_counter()
        generated = self.around("around_generation", self._counted)(prompts)
        self.add_seconds("sampling", time.perf_counter() - started)
        return generated

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        was_training = self.model.training
        try:
            return self.around("around_turn", super()._generate_single_turn)(prompt_ids, *args, **kwargs)
        finally:
            self.model.train(was_training)  # TRL's continuous batching leaves it training, even within an evaluation

    def _get_tool_suffix_ids(self, tool_messages):
        return self.around("around_reply", self.rendered)(tool_messages)

    def _calculate_rewards(self, *args, **kwargs):
        started = time.perf_counter()
        self._rewards_per_function = super()._calculate_rewards(*args, **kwargs)
        self.add_seconds("scoring", time.perf_counter() - started)
        return self._rewards_per_function

    def _replace_advantages(self, output: dict) -> None:
        """Replaces TRL's group-mean advantages (B,) with the baseline's, (B,) or (B, C)."""
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

    def _get_per_token_logps_and_entropies(self, model, *part, **kwargs):
        return self.passed(model, *part, **kwargs)

    def _compute_loss(self, model, inputs):
        return self.around("around_loss", super()._compute_loss)(model, inputs)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        for method in self.methods:
            method.after_micro_batch(loss.detach())
        return loss

    def _get_grad_norm(self, *args, **kwargs):
        """Returns the gradient norm over all processes, before clipping. transformers calls it once per step."""
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
        for method in self.methods:
            if self.lr_scheduler is None and (made := method.scheduler(optimizer or self.optimizer)) is not None:
                self.lr_scheduler, self._created_lr_scheduler = made, True
        return super().create_scheduler(num_training_steps, optimizer)

    # ---- services for methods

    def around(self, moment: str, make: Callable, below: Method | None = None) -> Callable:
        """Returns `make` wrapped in the hook `moment` of every method.

        below: wrap it only in methods that come before this one in the list; None: in all of them.
        """
        for method in self.methods:
            if method is below:
                break
            make = partial(getattr(method, moment), make)
        return make

    def passed(self, model, *part, below: Method | None = None, **kwargs):
        """Makes one forward of the model, wrapped in the methods. below: as in `around`."""
        make = self.around("around_pass", super()._get_per_token_logps_and_entropies, below)
        return make(model, *part, **kwargs)

    def rendered(self, tool_messages: list[dict]) -> list[int]:
        """Returns the tokens that TRL puts between a tool call and the next turn: the replies in the chat template."""
        return super()._get_tool_suffix_ids(tool_messages)

    def causal_model(self):
        """Returns the transformers model with the LM head, without the wrappers for several processes and for LoRA."""
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def summed_rewards(self) -> Tensor:
        """Returns the weighted sums of the reward functions, (P * G,) over all processes; NaN for unscored rollouts."""
        assert self._rewards_per_function is not None, "rewards come before their sums"
        weights = self.reward_weights.to(self._rewards_per_function.device)
        rewards = (self._rewards_per_function * weights).nansum(dim=1)
        return rewards.masked_fill(self._rewards_per_function.isnan().all(dim=1), torch.nan)

    def gathered(self, rows: Tensor) -> Tensor:
        """Collects the rows of all processes into prompt groups: (B, ...) -> (P, G, ...).

        If the second dimension differs between processes, it is padded with 0.
        """
        if rows.dim() > 1:
            rows = self.accelerator.pad_across_processes(rows, dim=1)
        return self.in_groups(self.accelerator.gather(rows))

    def in_groups(self, rows: Tensor) -> Tensor:
        """Splits rows into prompt groups: (P * G, ...) -> (P, G, ...)."""
        return rows.unflatten(0, (-1, self.num_generations))

    def record(self, metrics: dict[str, float], mode: str = "train") -> None:
        """Hands metrics of the step to TRL, which logs the mean of all values since the last log."""
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    def add_seconds(self, part: str, seconds: float) -> None:
        """Adds `seconds` to the time that a part of this step has taken."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    # ---- parts of the step

    def _counted(self, prompts):
        """Lets TRL sample, counts the tokens and records how each rollout ended.

        Tokens are counted here because TRL later masks truncated rollouts, although sampling them cost time.
        """
        generated = super()._generate(prompts)
        _, completion_ids, tool_mask, *_ = generated
        lengths = [len(ids) for ids in completion_ids]
        own_counts = lengths if tool_mask is None else [sum(mask) for mask in tool_mask]
        self.sampled_tokens = torch.tensor([own_counts, lengths], device=self.accelerator.device).T.contiguous()
        self.endings = ["end" if ids and ids[-1] in self.end_tokens else "length" for ids in completion_ids]
        return generated

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a response."""
        return (*self.eos_token_ids, self._tokenizer.pad_token_id)

    def _gathered_groups(self, own: OwnTokens, totals: dict, reduced: dict, **measured: Tensor) -> RolloutGroups:
        """Returns the prompt groups of all processes, built from each process's measurements.

        reduced, measured: rows (B, ...) of this process. totals: tensors of any shape, summed over the processes.
        """
        lengths = self.gathered(own.lengths)
        measured = {name: self.gathered(rows) for name, rows in measured.items()}
        if "prefix_norms" in measured:  # another process's rollouts may be longer
            measured["prefix_norms"] = exact_norms.kept_after_end(measured["prefix_norms"], lengths)
        return RolloutGroups(
            rewards=self.in_groups(self.summed_rewards()),
            lengths=lengths,
            reduced={name: self.gathered(rows) for name, rows in reduced.items()},
            totals={name: self.accelerator.reduce(total, reduction="sum") for name, total in totals.items()},
            **measured,
        )

    def _of_this_process(self, advantages: Tensor, own: OwnTokens) -> Tensor:
        """Returns this process's advantages in the layout of TRL's loss: (P, G, T or 1) -> (B, C) or (B,)."""
        local = slice(self.accelerator.process_index * len(own.mask), None)
        packed = advantages.flatten(0, 1)[local][: len(own.mask)]  # (B, T or 1): groups may span processes
        return packed[:, 0] if advantages.shape[-1] == 1 else own.unpack(packed[:, : own.width])

    def _log_rollouts(self, step: Step) -> None:
        rollouts, advantages, output = step.rollouts, step.advantages, step.output
        own_tokens, all_tokens = self.accelerator.gather(self.sampled_tokens).T
        metrics = length_metrics(own_tokens) | reward_metrics(rollouts)
        metrics |= advantage_metrics(rollouts, step.baseline, advantages)
        if self.passes.needs_score_norms:
            # The score norms already contain the factors of token weights, so the advantages must not.
            before_weights = advantages if step.factors is None else advantages_of(rollouts, step.baseline)
            metrics |= energy_metrics(rollouts, before_weights)
        if "tool_mask" in output:
            metrics["tool_tokens"] = int((all_tokens - own_tokens).sum())
        if len(self.reward_funcs) > 1 or self.reward_weights[0] != 1:
            metrics.pop("accuracy", None)  # a weighted sum is not a grade
        self.record(metrics)
        # TRL's table of completions holds the advantages of its own baseline: replace them by each rollout's mean.
        counts = rollouts.lengths.flatten().clamp(min=1) if advantages.shape[-1] > 1 else 1
        for _ in range(rollouts.rewards.numel()):
            self._logs["advantages"].pop()
        self._logs["advantages"].extend((advantages.flatten(0, 1).sum(-1) / counts).tolist())

    # ---- checkpoints also hold the state of the baseline and of the methods

    def _save_optimizer_and_scheduler(self, output_dir) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:  # the state is the same in all processes
            for file, learner in self._learners().items():
                torch.save(learner.state_dict(), os.path.join(output_dir, file))
        for method in self.methods:
            method.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        for name, learner in self._learners().items():
            file = os.path.join(checkpoint, name)
            if not os.path.exists(file):
                raise ValueError(
                    f"{checkpoint} has no {name}, but {baselines.name_of(learner)} continues from the state of earlier "
                    "steps. Resume from a checkpoint of a run that used it, or start anew."
                )
            learner.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        for method in self.methods:
            method.load(checkpoint)

    def _learners(self) -> dict[str, Any]:
        """Returns the objects that carry state from step to step: file in a checkpoint -> object."""
        learners = {BASELINE_STATE: self.baseline} if baselines.carries_state(self.baseline) else {}
        for method in self.methods:
            learners |= method.learners()
        return learners

    # ---- an evaluation does not change training

    def evaluate(self, *args, **kwargs):
        with isolated_random_state():
            return super().evaluate(*args, **kwargs)


def refuse_undeclared(baseline: Callable, advantages: Tensor) -> None:
    """Raises ValueError if a baseline returns one value per token without declaring it.

    advantages: (P, G, T) or (P, G, 1).
    """
    if advantages.shape[-1] > 1 and not baselines.is_per_token(baseline):
        raise ValueError(
            f"baseline {baselines.name_of(baseline)} returned one value per token without declaring it, so options "
            "that need one value per rollout were not refused. Declare it: @declare(per_token=True)."
        )


def keep_float32_outputs(accelerator) -> None:
    """Makes FSDP2 compute in bfloat16, but return log-probs and reduce gradients in float32.

    accelerate's own policy casts the model's output to bfloat16. A log-prob with eight bits gives wrong importance
    ratios, and wrong score norms near pi = 1. Call it before the model is wrapped. Without FSDP2 and bfloat16 it does
    nothing.
    """
    if not accelerator.is_fsdp2 or accelerator.mixed_precision != "bf16":
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy

    accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
