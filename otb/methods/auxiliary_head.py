"""Trains a multi-token-prediction head with the policy: its log-probs, its loss and its gradients. OTBTrainer calls it.

The head is not part of the policy's module, so sampling, vLLM, the policy's checkpoints and its gradient norm are
unaffected. Its parameters are in the same optimizer. Its gradients are averaged over the processes and clipped
separately.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from otb.adapters import final_norm
from otb.loss_inputs import per_position, response_mask
from otb.methods import Method
from otb.methods.auxiliary import MultiTokenPrediction, refuse_architecture
from otb.methods.mtp import (
    MTPHead,
    aggregated,
    clipped,
    head_log_probs,
    limited,
    mean_of_ratios,
    predicted,
    products,
    ratio_of_sums,
)
from otb.policies.mimo import shipped_head

STATE = "mtp_head.pt"  # file in a checkpoint: the head's weights
OLD = "old_head_log_probs"  # key in a batch: the head's log-probs at the moment of sampling


class AuxiliaryHead(Method, TrainerCallback):
    """Holds the head, computes its loss and updates it.

    `attach` raises ValueError for options or an architecture that heads were not tested with, and for a model that
    comes without the shipped head that was asked for.
    """

    def __init__(self, options: MultiTokenPrediction):
        self.options = options
        self.pass_of: str | None = None  # "sampling" or "loss" while the head reads TRL's passes for it
        self.seen: list[tuple[Tensor, Tensor]] = []  # log-probs (B, C) of the policy and of the head, per pass
        self.sampled_at = 0  # optimizer steps done when the batch was sampled

    def attach(self, trainer) -> None:
        super().attach(trainer)
        trainer.add_callback(self)
        self.options.refuse(trainer.asked.but(peft_config=getattr(trainer.model, "peft_config", None)))
        self.causal = causal = trainer.causal_model()
        refuse_architecture(causal.config.model_type)
        self.head = MTPHead(causal, trainer.args.seed).to(trainer.accelerator.device)
        if self.options.weights == "shipped":
            commit = getattr(causal.config, "_commit_hash", None)  # None for a folder
            self.head.load_state_dict(shipped_head(causal.name_or_path, commit))

    def allows_lean(self, batch) -> bool:
        return False  # the head's loss reads every rollout

    def while_sampling(self):
        return self.passes_of("sampling") if self.options.reads_old_head else nullcontext()

    def around_pass(self, make, model, ids, mask, width, *args, **kwargs):
        if not self.is_to_see(model):
            return make(model, ids, mask, width, *args, **kwargs)
        with self.reading(ids, mask, width) as of_head:
            result = make(model, ids, mask, width, *args, **kwargs)
        self.seen.append((result[0], torch.cat(of_head)))
        return result

    def around_loss(self, make, model, inputs):
        if not self.trainer.model.training:
            return make(model, inputs)
        with self.passes_of("loss"):
            loss = make(model, inputs)
            of_head, metrics = self.loss(inputs, response_mask(inputs))
        self.trainer.record(metrics)
        return loss + (of_head - of_head.detach())  # adds 0 and a gradient: the logged loss stays the policy's

    # ---- the head reads TRL's passes

    @contextmanager
    def passes_of(self, what: str) -> Iterator[None]:
        """Makes the head read TRL's passes inside the block, and forgets earlier ones. what: "sampling" or "loss"."""
        self.pass_of, self.seen = what, []
        try:
            yield
        finally:
            self.pass_of = None

    def is_to_see(self, model: Any) -> bool:
        """Tells whether the head reads this pass: only the policy's, inside `passes_of`."""
        return self.pass_of == "loss" or (self.pass_of == "sampling" and model is self.trainer.model)

    @contextmanager
    def reading(self, ids: Tensor, attention_mask: Tensor, width: int) -> Iterator[list[Tensor]]:
        """Collects the head's log-probs (b, width) of every forward inside the block.

        ids, attention_mask: (B, L). The forwards take the rows in order, b rows each.
        """
        collected: list[Tensor] = []
        detached = not self.options.acts(self.trainer.state.global_step)

        def read(states: Tensor) -> None:
            first = sum(map(len, collected))
            rows = slice(first, first + len(states))
            part = (ids[rows], attention_mask[rows], states, width, self.trainer.temperature, detached)
            collected.append(head_log_probs(self.head, self.causal, *part))

        backbone: Any = self.causal.base_model
        if self.options.weights == "shipped":  # MiMo's head was trained on the input of the final norm
            hook = final_norm(backbone).register_forward_pre_hook(lambda _, inputs: read(inputs[0]))
        else:
            hook = backbone.register_forward_hook(lambda _, __, result: read(result.last_hidden_state))
        try:
            yield collected
        finally:
            hook.remove()

    def begin(self, output: dict) -> None:
        """Puts the head's old log-probs into the batch, if TRL made a pass for the policy's."""
        self.sampled_at = self.trainer.state.global_step
        for log_probs, of_head in self.seen:
            if log_probs is output.get("old_per_token_logps"):
                output[OLD] = of_head
        self.seen = []

    # ---- the loss

    def loss(self, inputs: dict, own: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Returns the head's loss for the forward that it has just read, and metrics. own (B, C) bool: own tokens."""
        (log_probs, of_head), self.seen = self.seen[0], []
        log_probs, width = log_probs.detach(), own.size(1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        own = own & predicted(attention_mask, width)
        old = inputs.get("old_per_token_logps", log_probs)
        sums = self._sums(log_probs - old, of_head.detach(), old, inputs.get(OLD, of_head.detach()), own)
        count = max(sums["tokens"], 1.0)
        metrics = {"mtp_cross_entropy": sums["cross_entropy"] / count}
        accumulated = self.trainer.current_gradient_accumulation_steps
        processes = self.trainer.accelerator.num_processes  # their gradients are averaged, so the loss is multiplied
        cross_entropy = -(of_head * own).sum() * (processes / count / accumulated)
        if not self.options.acts(self.trainer.state.global_step):
            return cross_entropy, metrics
        if self.options.mode == "ce":
            return self.options.weight * cross_entropy, metrics
        weight = self.options.weight
        if self.options.has_lambda:
            measured = self._lambda(sums)
            weight = measured["mtp_lambda"]
            metrics |= measured
        return weight * self._policy_loss(of_head, old, inputs, own), metrics

    def _sums(self, changes: Tensor, of_head: Tensor, old: Tensor, old_head: Tensor, own: Tensor) -> dict[str, float]:
        """Returns the sums over all processes that lambda and the cross-entropy need. All tensors are (B, C)."""
        parts = [
            torch.stack([own.sum().float(), -(of_head * own).sum()]),
            products(changes, of_head - old_head, own),
            mean_of_ratios(changes, of_head - old, self.options.eps),
        ]
        summed = self.trainer.accelerator.reduce(torch.cat(parts), reduction="sum").tolist()
        return dict(zip(("tokens", "cross_entropy", "c", "v2", "d2", "ratios", "positions"), summed, strict=True))

    def _lambda(self, sums: dict[str, float]) -> dict[str, float]:
        """Returns lambda and its ingredients under their names in METRICS."""
        options = self.options
        if self.trainer.state.global_step == self.sampled_at:
            # The weights have not changed since sampling, and a difference of rounding must not count as a change.
            return {"mtp_lambda": 0.0}
        measured = {}
        if options.mode == "occ":
            measured = {"mtp_c": sums["c"], "mtp_v2": sums["v2"]}
            if (squares := sums["v2"] * sums["d2"]) > 0:
                measured["mtp_cosine"] = sums["c"] / squares**0.5
            value = ratio_of_sums(sums["c"], sums["v2"], options.lambda_plus, options.eps, options.limit)
        else:
            value = limited(options.lambda_plus * sums["ratios"] / sums["positions"], options.limit)
        return measured | {"mtp_lambda": value}

    def _policy_loss(self, of_head: Tensor, old: Tensor, inputs: dict, own: Tensor) -> Tensor:
        """Returns the head's clipped policy loss, with the policy's advantages and TRL's normaliser."""
        trainer, args = self.trainer, self.trainer.args
        advantages = per_position(inputs["advantages"])
        reference = inputs.get(OLD, of_head.detach()) if self.options.ratio_to == "head" else old
        per_token = clipped(of_head - reference, advantages, trainer.epsilon_low, trainer.epsilon_high)
        if (rho := inputs.get("importance_sampling_ratio")) is not None:
            per_token = per_token * rho
        accumulated = trainer.current_gradient_accumulation_steps
        sampled = inputs["num_items_in_batch"].clamp(min=1)  # tokens of the generation, of all processes
        tokens = float(sampled / trainer.accelerator.num_processes / args.steps_per_generation)
        return aggregated(per_token, own, args.loss_type, trainer.max_completion_length, tokens) / accumulated

    # ---- the update

    def learners(self) -> dict[str, MTPHead]:
        return {STATE: self.head}

    def add_to(self, optimizer: torch.optim.Optimizer, weight_decay: float) -> None:
        """Adds the head's parameters to the policy's optimizer; norms do not decay."""
        for decays in (True, False):
            parameters = [parameter for parameter in self.head.parameters() if (parameter.dim() > 1) == decays]
            optimizer.add_param_group({"params": parameters, "weight_decay": weight_decay if decays else 0.0})

    def gradient(self, norm):
        """Averages the head's gradients over the processes and clips them separately from the policy's."""
        parameters = [parameter for parameter in self.head.parameters() if parameter.grad is not None]
        for parameter in parameters:
            parameter.grad = self.trainer.accelerator.reduce(parameter.grad, reduction="mean")
        of_head = float(torch.nn.utils.clip_grad_norm_(parameters, self.trainer.args.max_grad_norm or float("inf")))
        return norm if math.isfinite(of_head) else of_head  # not finite: RunTrainer stops on it

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        self.head.zero_grad()
