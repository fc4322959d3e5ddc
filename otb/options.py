"""Options of trl.GRPOConfig that make no sense with a baseline.

Checked by OTBTrainer, and by the command line before it imports torch: this file imports neither torch nor trl.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otb import baselines

# What each sampling option must be for the softmax at the temperature to be the distribution sampled from.
NEUTRAL_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}


def refuse_options(args: Any, baseline: Callable, needs_score_norms: bool) -> None:
    """Raises ValueError for options of GRPOConfig (`args`, any object with its attributes) that do not fit."""
    name, group_size = baselines.name_of(baseline), args.num_generations
    if group_size < (smallest := baselines.min_group_size_of(baseline)):
        raise ValueError(
            f"num_generations={group_size}: baseline {name} compares rollouts of one prompt and needs at least "
            f"{smallest}. Raise it, or use a baseline that works with one rollout (none, otb)."
        )
    if args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"multi_objective_aggregation={args.multi_objective_aggregation!r} normalises each reward by its group, "
            "which is a baseline of its own. Use 'sum_then_normalize'."
        )
    if baselines.is_per_token(baseline):
        if args.off_policy_mask_threshold is not None:
            raise ValueError(
                f"off_policy_mask_threshold={args.off_policy_mask_threshold} keeps or drops whole rollouts by the sign "
                f"of one advantage; {name} has one per token. Use off_policy_mask_threshold=null."
            )
        if args.loss_type == "vespo":
            raise ValueError(
                f"loss_type='vespo' weighs whole rollouts by the sign of one advantage; {name} has one per token. "
                "Use 'dr_grpo' or 'dapo'."
            )
    if needs_score_norms:
        generation = args.generation_kwargs or {}
        for option, neutral in NEUTRAL_SAMPLING.items():
            value = generation.get(option, getattr(args, option))
            if value not in (neutral, None):
                raise ValueError(
                    f"{option}={value}: the score norms are those of the softmax at the temperature, and with {option} "
                    f"that is not the distribution sampled from. Use {option}={neutral}, or a baseline without energy."
                )
