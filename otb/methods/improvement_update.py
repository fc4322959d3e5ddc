"""Updates the policy once more on the previous batch, as PIPO does. OTBTrainer calls it if `improvement` is given.

A step has four parts:

    rollouts of batch t                  gives rewards, and log pi of the policy that sampled them, before any update
    improvement update on batch t - 1    if there is a weight phi (otb/methods/improvement.py): clipped ratio to the
                                         policy that sampled batch t - 1, its advantages times phi, the step's
                                         learning rate
    ordinary update on batch t           uses the log-probs from before the improvement update, if there was one
    batch t is kept                      for the next step and for the checkpoint

If there is no weight, or batch t - 1 has no advantage to learn from, the optimizer makes no step: even with a gradient
of 0, Adam's momentum would move the weights.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from otb.errors import RunError
from otb.loss_inputs import per_position, response_mask
from otb.methods import Method, Step
from otb.methods.improvement import PolicyImprovement, group_scales

STATE = "improvement_{}.pt"  # file in a checkpoint, one per process: each keeps its share of the batch
# Keys in a batch: values for the next step's improvement update, removed before the ordinary update.
LOG_PROBS, ADVANTAGES = "improvement_log_probs", "improvement_advantages"


class ImprovementUpdate(Method):
    """Updates the policy once more on the previous batch, with the weight that `improvement` computes."""

    def __init__(self, improvement: PolicyImprovement):
        self.improvement = improvement
        self._mean_reward = float("nan")  # of the last generation, over all processes
        self._kept: list[dict] | None = None  # micro-batches of the previous generation, as inputs of the loss
        self._log_probs_of_update: list[Tensor] | None = None  # per micro-batch; None except during an update

    def attach(self, trainer) -> None:
        super().attach(trainer)
        if self.improvement.seed is None:
            self.improvement.seed = trainer.args.seed

    def allows_lean(self, batch: dict) -> bool:
        return False

    def finish(self, step: Step) -> None:
        """Puts into the batch what its improvement update will need one step later."""
        output, rollouts, advantages = step.output, step.rollouts, step.advantages
        known = output.get("old_per_token_logps", step.log_probs)
        log_probs = self.trainer.passes.extra(step)[0] if known is None else known
        self._mean_reward = rollouts.rewards.nanmean().item()
        kept = output["advantages"]
        if self.improvement.advantages == "scaled":
            scales = group_scales(rollouts.rewards, advantages, rollouts.lengths).expand(rollouts.rewards.shape)
            first = self.trainer.accelerator.process_index * len(kept)
            local = scales.flatten()[first : first + len(kept)]
            kept = kept * (local if kept.dim() == 1 else local.unsqueeze(1))
        output[LOG_PROBS], output[ADVANTAGES] = log_probs, kept

    def batches(self, batches: list[dict]) -> list[dict]:
        """Updates the policy on the previous batch, if there is a weight and a signal, and keeps the new batch."""
        started = time.perf_counter()
        reading = self.improvement.observe(self._mean_reward)
        metrics = reading.metrics()
        kept, self._kept = self._kept, []
        updates = False
        if reading.phi and kept is not None and (updates := self._has_signal(kept)):
            metrics |= self._update_on(kept, reading.phi)
        for batch in batches:
            log_probs, advantages = batch.pop(LOG_PROBS), batch.pop(ADVANTAGES)
            self._kept.append(batch | {"old_per_token_logps": log_probs, "advantages": advantages})
            if updates:  # otherwise the ratio is exactly 1 without them, as in a run without improvement updates
                batch["old_per_token_logps"] = log_probs
        self.trainer.record(metrics)
        self.trainer.seconds["improvement"] = time.perf_counter() - started
        return batches

    def _has_signal(self, batches: list[dict]) -> bool:
        """Tells whether any process has an advantage other than 0."""
        found = torch.stack(
            [(per_position(batch["advantages"]) * response_mask(batch)).any() for batch in batches]
        ).any()
        return bool(self.trainer.accelerator.gather(found.reshape(1)).any())

    def _update_on(self, batches: list[dict], phi: float) -> dict[str, float]:
        """Makes one optimizer step on the kept micro-batches with advantages times phi, and returns its metrics.

        Only the ordinary update advances the learning-rate schedule and the count of steps, and only its loss has the
        KL term, the entropy bonus and the router's loss. Raises RunError if the gradient norm is not finite.
        """
        model = self.trainer.model_wrapped
        with self._by_itself(len(batches)) as (metrics, log_probs), self.trainer.accelerator.no_sync(model):
            for number, batch in enumerate(batches, start=1):
                with self.trainer.compute_loss_context_manager():
                    loss = self.trainer.compute_loss(model, batch | {"advantages": phi * batch["advantages"]})
                last = number == len(batches)
                with self.trainer.accelerator.trigger_sync_in_backward(model) if last else nullcontext():
                    self.trainer.accelerator.backward(loss)
        norm = float(
            self.trainer.accelerator.clip_grad_norm_(
                model.parameters(), self.trainer.args.max_grad_norm or float("inf")
            )
        )
        if not math.isfinite(norm):
            raise RunError(
                f"improvement_gradient_norm={norm} at step {self.trainer.state.global_step + 1}, from the rollouts of "
                "the step before; it must be finite, and training stops before the weights change. Try a smaller "
                "learning_rate, or improvement.cap=3."
            )
        # accelerate's wrapper would step only after the ordinary update's last backward, so the inner one steps.
        wrapped: Any = self.trainer.optimizer
        getattr(wrapped, "optimizer", wrapped).step()
        model.zero_grad()
        clipped = metrics.get("clip_ratio/region_mean")
        found = {"improvement_gradient_norm": norm, "improvement_ratio_mean": self._mean_ratio(batches, log_probs)}
        return found | ({"improvement_clip_fraction": sum(clipped) / len(clipped)} if clipped else {})

    @contextmanager
    def _by_itself(self, micro_batches: int) -> Iterator[tuple[dict[str, list], list[Tensor]]]:
        """Restricts losses inside the block to the policy loss, and collects their metrics separately from the step's.

        -> these metrics, and log pi (b, C) of every micro-batch.
        """
        metrics: dict[str, list] = defaultdict(list)
        options: dict[str, Any] = {"beta": 0.0, "_entropy_bonus_enabled": False, "aux_loss_enabled": False}
        options["current_gradient_accumulation_steps"] = micro_batches
        before = {name: getattr(self.trainer, name) for name in options}
        of_step, self.trainer._metrics["train"] = self.trainer._metrics["train"], metrics
        log_probs: list[Tensor] = []
        self._log_probs_of_update = log_probs
        _set(self.trainer, options)
        try:
            yield metrics, log_probs
        finally:
            _set(self.trainer, before)
            self.trainer._metrics["train"], self._log_probs_of_update = of_step, None

    def around_pass(self, make, *args, **kwargs):
        result = make(*args, **kwargs)
        if self._log_probs_of_update is not None:
            self._log_probs_of_update.append(result[0].detach())
        return result

    def _mean_ratio(self, batches: list[dict], log_probs: list[Tensor]) -> float:
        """Returns the mean ratio to the policy that sampled the batch, over the own tokens of all processes."""
        ratios = [
            (new - batch["old_per_token_logps"]).exp()[response_mask(batch)].double()
            for batch, new in zip(batches, log_probs, strict=True)
        ]
        joined = torch.cat(ratios)
        total, count = self.trainer.accelerator.reduce(
            torch.stack([joined.sum(), joined.new_tensor(len(joined))]), "sum"
        )
        return float(total / count.clamp(min=1))

    # ---- checkpoints hold the window and the kept batch

    def save(self, folder) -> None:
        os.makedirs(folder, exist_ok=True)  # the first process may not have created it yet
        state = {"window": self.improvement.state_dict(), "batches": self._kept}
        state["processes"] = self.trainer.accelerator.num_processes
        torch.save(state, os.path.join(folder, STATE.format(self.trainer.accelerator.process_index)))

    def load(self, checkpoint) -> None:
        name, processes = STATE.format(self.trainer.accelerator.process_index), self.trainer.accelerator.num_processes
        file = os.path.join(checkpoint, name)
        if not os.path.exists(file):
            raise ValueError(
                f"{checkpoint} has no {name}, but an improvement update needs the batch of the step before. "
                "Resume from a checkpoint of a run with improvement= on as many processes, or start anew."
            )
        state = torch.load(file, map_location="cpu", weights_only=True)  # it rejects "cpu:0", accelerate's device
        if state["processes"] != processes:
            raise ValueError(
                f"{checkpoint} was written by {state['processes']} processes, each with its share of the batch for the "
                f"next improvement update, and this run has {processes}. Resume with as many, or start anew."
            )
        self.improvement.load_state_dict(state["window"])
        self._kept = send_to_device(state["batches"], self.trainer.accelerator.device)


def _set(holder: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(holder, name, value)
