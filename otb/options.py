"""Options of trl.GRPOConfig that make no sense with a baseline.

Checked by OTBTrainer, and by the command line before it imports torch: this file imports neither torch nor trl.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otb import baselines

# What each option of GRPOConfig must be for the softmax at the temperature to be the distribution sampled from.
NEUTRAL_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
# Further options of generate() that change what is sampled; TRL leaves them to generation_kwargs and to the model's own
# generation configuration, which fills in whatever TRL sets to None.
OTHER_SAMPLING = {"min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "num_beams": 1}
OTHER_SAMPLING |= {"no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "min_length": 0, "min_new_tokens": 0}
OTHER_SAMPLING |= {"top_h": None, "penalty_alpha": None, "bad_words_ids": None, "suppress_tokens": None}
OTHER_SAMPLING |= {
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "guidance_scale": None,
    "watermarking_config": None,
}


def refuse_options(args: Any, baseline: Callable, needs_score_norms: bool) -> None:
    """Raises ValueError for options of GRPOConfig (`args`, any object with its attributes) that do not fit."""
    name, group_size = baselines.name_of(baseline), args.num_generations
    if group_size < (smallest := baselines.min_group_size_of(baseline)):
        raise ValueError(
            f"num_generations={group_size}: baseline {name} compares rollouts of one prompt and needs at least "
            f"{smallest}. Raise it, or use a baseline that works with one rollout (none, otb, energy_probe)."
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
        generation = dict(args.generation_kwargs or {})
        if "temperature" in generation or generation.get("do_sample") is False:
            raise ValueError(
                f"generation_kwargs={generation} sets how tokens are drawn behind the trainer's back. Use temperature= "
                "for the temperature; greedy decoding leaves nothing to learn from."
            )
        refuse_generation({name: getattr(args, name) for name in NEUTRAL_SAMPLING} | generation, "", NEUTRAL_SAMPLING)
        refuse_generation(generation, "generation_kwargs")


def refuse_generation(options: dict, source: str, neutral: dict = OTHER_SAMPLING) -> None:
    """Raises ValueError for a sampling option that is not neutral. source: where it stands, for the message."""
    for name, value in neutral.items():
        if (given := options.get(name)) not in (value, None):
            where = f" in {source}" if source else ""
            raise ValueError(
                f"{name}={given}{where}: the score norms are those of the softmax at the temperature, and with {name} "
                f"that is not the distribution sampled from. Use {name}={value}, or a baseline without energy."
            )
