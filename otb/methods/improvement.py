"""Computes PIPO's weight of an improvement update (arXiv 2604.00860): was the last update followed by a better batch?

The mean reward mu_t of every batch is compared with the mean rewards of the `window` batches before it: xi_t = (mu_t -
mu_his) / (sigma_his + eps). otb/methods/improvement_update.py then updates the policy once more on the previous batch
with its advantages times phi_t = xi_t if xi_t >= 0, else `negative_scale` xi_t. Importing this file imports no torch.
docs/neighbours/pipo.md lists the sources, and our choices where they disagree.
"""

from __future__ import annotations

import math
import random
import statistics
from typing import TYPE_CHECKING, Literal, NamedTuple

from otb.refusals import Options, Taken
from otb.values import Rule, is_positive, refuse_out_of_range, refuse_unknown

if TYPE_CHECKING:
    from torch import Tensor

RULES = {
    "window": Rule("a whole number >= 2, as one reward has no deviation", lambda value: value >= 2, 8, whole=True),
    "negative_scale": Rule("a number from 0 to 1", lambda value: 0 <= value <= 1, 0.1),
    "weight": Rule("a number other than 0", lambda value: value != 0 and math.isfinite(value), 0.43),
    "eps": Rule("a positive number", is_positive, 1e-8),
    "cap": Rule("a positive number, or null for none", is_positive, 3, optional=True),
}

UNTRIED = "has not been tried with improvement updates, which change the weights between the rollouts and their update"
CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # TRL's losses with a clipped ratio
WORKS_WITH = (
    Taken("num_iterations", (1,), "makes several updates on a batch; the improvement update weighs one update"),
    Taken("loss_type", CLIPPED_LOSSES, "has no clipped ratio to hold the improvement update near the policy before"),
    Taken("off_policy_mask_threshold", (None,), "keeps or drops rollouts by the sign of an advantage, which may turn"),
    Taken("use_vllm", (False,), UNTRIED),
    Taken("fp16", (False,), UNTRIED),
)


class Reading(NamedTuple):
    """Holds what a batch says about the update before it; fields that are not known yet are None.

    mu: mean reward of the batch. mu_his: mean over the window before it. xi: their difference in standard deviations.
    phi: factor of the previous batch's advantages; None for no update on it.
    """

    mu: float | None = None
    mu_his: float | None = None
    xi: float | None = None
    phi: float | None = None

    def metrics(self) -> dict[str, float]:
        """Returns the known fields under their names in otb.records.metric_names.METRICS."""
        return {f"improvement_{name}": value for name, value in self._asdict().items() if value is not None}


class PolicyImprovement:
    """Turns the mean rewards of the batches so far into the weight of the next improvement update.

    Args:
        mode: "pipo": phi_t follows xi_t. "constant": phi_t = `weight`, a control that replays the previous batch
            whatever its result. "shuffled": phi_t follows an earlier xi, drawn uniformly; a control whose weights have
            PIPO's distribution, but whose sign says nothing about the last update. It needs an earlier xi, so its
            updates begin one batch later.
        window: K, the number of previous batches whose mean rewards form the comparison. Updates begin after K batches.
        negative_scale: lambda, the factor of a negative xi.
        weight: phi in mode "constant". The default, 0.43, is the mean of phi if nothing improves and mean rewards are
            normal.
        eps: added to sigma_his. A sigma_his below eps counts as 1, as in the authors' code.
        cap: clips xi to [-cap, cap]; None for no clipping.
        advantages: "native": as in the ordinary update. "scaled": G A_i / sum_j |A_j| in each group, as in the paper.
        seed: of the draws of "shuffled"; None for the trainer's seed.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(
        self,
        mode: Literal["pipo", "constant", "shuffled"] = "pipo",
        window: int = 8,
        negative_scale: float = 0.1,
        weight: float = 0.43,
        eps: float = 1e-8,
        cap: float | None = None,
        advantages: Literal["native", "scaled"] = "native",
        seed: int | None = None,
    ):
        self.mode, self.window, self.negative_scale, self.weight = mode, window, negative_scale, weight
        self.eps, self.cap, self.advantages, self.seed = eps, cap, advantages, seed
        self._means: list[float] = []  # of the last `window` batches
        self._xis: list[float] = []  # all so far, for "shuffled" alone
        refuse_out_of_range(vars(self), RULES)
        refuse_unknown("mode", mode, ("pipo", "constant", "shuffled"))
        refuse_unknown("advantages", advantages, ("native", "scaled"))

    def refuse(self, options: Options) -> None:
        """Raises ValueError for options with which an improvement update would mean something else."""
        off, accumulation = ("improvement", None), options.gradient_accumulation_steps
        options.refuse_sharding("an improvement update has only been tried with whole ones", off)
        options.refuse_others(WORKS_WITH, off)
        if options.steps_per_generation != accumulation:
            rule = f"beside {options.says('gradient_accumulation_steps')}: the update weighs one step for each batch"
            raise options.refusal("steps_per_generation", rule, ("steps_per_generation", accumulation), off)

    @property
    def steps_before(self) -> int:
        """The number of steps before the first improvement update; "shuffled" needs one more, for an earlier xi."""
        return self.window + (self.mode == "shuffled")

    def observe(self, mean_reward: float) -> Reading:
        """Compares the mean reward of a new batch, over all processes, with the window, and adds it to the window.

        A mean of NaN, from a batch without a scored rollout, gives an empty Reading and leaves the window unchanged.
        """
        if not math.isfinite(mean_reward):
            return Reading()
        reading = self._compared(mean_reward)
        self._means = [*self._means, mean_reward][-self.window :]
        return reading

    def _compared(self, mu: float) -> Reading:
        if len(self._means) < self.window:
            return Reading(mu)
        mu_his, sigma_his = statistics.fmean(self._means), statistics.stdev(self._means)
        xi = (mu - mu_his) / (1.0 if sigma_his < self.eps else sigma_his + self.eps)
        if self.cap is not None:
            xi = max(-self.cap, min(self.cap, xi))
        return Reading(mu, mu_his, xi, self._weight(xi))

    def _weight(self, xi: float) -> float | None:
        if self.mode == "constant":
            return self.weight
        if self.mode == "shuffled":
            earlier = self._xis
            self._xis = [*earlier, xi]
            if not earlier:
                return None
            # The seed depends on the number of draws, so a resumed run draws the same as an uninterrupted one.
            xi = random.Random(f"{self.seed} {len(earlier)}").choice(earlier)
        return xi if xi >= 0 else self.negative_scale * xi

    def state_dict(self) -> dict[str, list[float]]:
        """Returns the mean rewards of the window and the earlier xi; they are the same in all processes."""
        return {"means": list(self._means), "xis": list(self._xis)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Restores what `state_dict` returned."""
        self._means, self._xis = list(state["means"])[-self.window :], list(state["xis"])


def group_scales(rewards: Tensor, advantages: Tensor, lengths: Tensor) -> Tensor:
    """Returns G / sum_j |A_j| of each group, with A_j the mean of rollout j's advantages; 0 if all of them are 0.

    rewards, lengths (P, G); advantages (P, G, T), 0 past the last own token, or (P, G, 1) -> (P, 1), one factor for all
    tokens of a group.
    """
    per_token = advantages.shape[-1] > 1
    means = advantages.sum(-1) / lengths.clamp(min=1) if per_token else advantages.squeeze(-1)
    total = means.abs().sum(1, keepdim=True)
    # With equal rewards a baseline leaves rounding errors, which must not be scaled up to advantages of 1.
    rounding = 1e-5 * rewards.nan_to_num().abs().sum(1, keepdim=True)
    return (rewards.shape[1] / total).masked_fill(total <= rounding, 0.0)
