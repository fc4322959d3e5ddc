"""Measures how far the trained policy is from the sampler, with statistics of r = log pi_trained - log pi_sampled.

Sampler and trainer hold the same weights but compute with different kernels or in a different precision. The
definitions follow verl's `rollout_corr_helper.py`. OTBTrainer calls it; it measures if the sampler's log-probs are
known.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otb.loss_inputs import response_mask
from otb.methods import Method, Step
from otb.rollouts import OwnTokens

LARGEST = 20.0  # largest |log ratio|, verl's bound: the exponential of a larger one would dominate every mean


def mismatch_metrics(log_ratio: Tensor, own: Tensor) -> dict[str, float]:
    """Returns the mismatch of a batch of rollouts under its names in `otb.records.metric_names.METRICS`.

    log_ratio: (B, T), log pi of the trained policy minus the sampler's; NaN where the sampler gave no log-prob.
    own: (B, T) bool, True = own token that counts. NaN tokens and rollouts without a counted token are left out.
    -> empty if no token remains.

    log_ppl_abs_diff_*: |mean_t r_t| of each rollout, its mean and its maximum over rollouts.
    mismatch_kl: mean(-r), an estimate of KL(sampler || trained).
    mismatch_k3: mean(exp(r) - r - 1), another estimate of it, never negative.
    mismatch_chi2_token: mean(exp(2 r)) - 1.
    mismatch_chi2_seq: mean over rollouts of exp(2 sum_t r_t) - 1.
    """
    counts = own & ~log_ratio.isnan()
    r = log_ratio.double().masked_fill(~counts, 0.0)
    tokens = counts.sum(1)
    r, counts, tokens = r[tokens > 0], counts[tokens > 0], tokens[tokens > 0]
    if not len(r):
        return {}
    of_tokens = r[counts].clamp(-LARGEST, LARGEST)
    of_rollouts = r.sum(1).clamp(-LARGEST, LARGEST)
    log_ppl = (r.sum(1) / tokens).abs()
    values = {
        "log_ppl_abs_diff_mean": log_ppl.mean(),
        "log_ppl_abs_diff_max": log_ppl.max(),
        "mismatch_kl": -r[counts].mean(),
        "mismatch_k3": (torch.expm1(of_tokens) - of_tokens).mean(),
        "mismatch_chi2_token": torch.expm1(2 * of_tokens).mean(),
        "mismatch_chi2_seq": torch.expm1(2 * of_rollouts).mean(),
    }
    return {name: value.item() for name, value in values.items()}


class SamplerMismatch(Method):
    """Drops rollouts outside `geometric_ratio_band`, and logs the mismatch if the sampler's log-probs are known.

    It logs nothing if it would need an extra pass and the prompts have images, which this pass would not see.
    """

    def begin(self, output: dict) -> None:
        self._sampled = OwnTokens(response_mask(output))  # including the rollouts that the band drops
        if (band := getattr(self.trainer.args, "geometric_ratio_band", None)) is None:
            return
        accelerator, outside = self.trainer.accelerator, outside_band(output, *band)
        output["completion_mask"] = output["completion_mask"] * ~outside.unsqueeze(1)
        # dapo, cispo and vespo divide by it. TRL does not count truncated rollouts that it masks, either.
        output["num_items_in_batch"] = accelerator.gather(response_mask(output).sum()).sum()
        self.trainer.record({"dropped_by_mismatch": accelerator.gather(outside.float()).mean().item()})

    def measured(self, step: Step) -> None:
        output, trainer = step.output, self.trainer
        if output.get("sampling_per_token_logps") is None:
            return
        if step.log_probs is None or (trainer.lean.is_noisy and step.log_probs is output.get("old_per_token_logps")):
            if "pixel_values" in output:
                return
            step.log_probs = trainer.passes.extra(step)[0]
        ratio = self._sampled.pack(step.log_probs - output["sampling_per_token_logps"])
        ratio = trainer.gathered(ratio).flatten(0, 1)
        lengths = trainer.gathered(self._sampled.lengths).flatten()
        trainer.record(mismatch_metrics(ratio, torch.arange(ratio.size(1), device=ratio.device) < lengths.unsqueeze(1)))


def outside_band(output: dict, low: float, high: float) -> Tensor:
    """Tells which rollouts have a geometric mean of trained / sampled probability outside [low, high]. -> (B,) bool.

    output: TRL's batch with the log-probs of the policy and of the sampler. A token without a sampler's log-prob (NaN)
    counts with ratio 1.
    """
    own = response_mask(output)
    difference = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).nan_to_num(0.0) * own
    mean = difference.sum(1) / own.sum(1).clamp(min=1)
    return (mean < math.log(low)) | (mean > math.log(high))
