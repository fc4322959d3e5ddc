"""Checks which options make sense together: those of trl.GRPOConfig with a baseline, and the batches of a step.

OTBTrainer calls it, and so does the command line before it imports torch: this file imports neither torch nor trl.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from otb import baselines
from otb.values import refuse_arguments

# What each option of GRPOConfig must be for the softmax at the temperature to be the distribution sampled from.
NEUTRAL_SAMPLING = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "vllm_structured_outputs_regex": None,
}
# Further options of generate() and of vLLM's SamplingParams that change what is sampled; TRL leaves them to
# generation_kwargs and to the model's own generation configuration, which fills in whatever TRL sets to None.
OTHER_SAMPLING = {
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "top_h": None,
    "penalty_alpha": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "guidance_scale": None,
    "watermarking_config": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "min_tokens": 0,
    "allowed_token_ids": None,
    "bad_words": None,
    "structured_outputs": None,
}

SCORE_NORMS = ("the score norms", "a baseline without energy")  # what reads the softmax, and what does not
SAMPLER_DTYPES = ("bfloat16",)


def refuse_options(args: Any, baseline: Callable, needs_score_norms: bool, weighs_tokens: bool = False) -> None:
    """Raises ValueError for options that do not fit the baseline. args: a GRPOConfig, or what has its attributes.

    weighs_tokens: whether token weights make an advantage per token of whatever the baseline returns.
    """
    refuse_arguments(baseline)
    name, group_size = baselines.name_of(baseline), args.num_generations
    if group_size < (smallest := baselines.min_group_size_of(baseline)):
        other = ", or use a baseline that works with one rollout (none, otb, energy_probe)" if group_size == 1 else ""
        raise ValueError(
            f"num_generations={group_size}: baseline {name} compares rollouts of one prompt and needs at least "
            f"{smallest}. Try num_generations={smallest}{other}."
        )
    if args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"multi_objective_aggregation={args.multi_objective_aggregation!r} normalises each reward by its group, "
            "which is a baseline of its own. Use 'sum_then_normalize'."
        )
    if weighs_tokens or baselines.is_per_token(baseline):
        name = name if baselines.is_per_token(baseline) else "token_weights"
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
        refuse_other_sampling(args, SCORE_NORMS)


def refuse_sampler_dtype(args: Any) -> None:
    """Raises ValueError where a copy of the policy cannot sample as it is asked to. args: as in `refuse_options`."""
    dtype = getattr(args, "sampler_dtype", None)
    if dtype is None:
        return
    if dtype not in SAMPLER_DTYPES:
        raise ValueError(
            f"sampler_dtype={dtype} is not one of {', '.join(SAMPLER_DTYPES)}. Try sampler_dtype=bfloat16."
        )
    for option in ("use_vllm", "use_transformers_continuous_batching", "cast_lm_head_to_fp32", "bf16", "fp16"):
        if getattr(args, option, False):
            raise ValueError(
                f"{option}=True beside sampler_dtype={dtype}: the sampler is a copy of a float32 policy, which nothing "
                f"else samples for or casts. Use {option}=False, or sampler_dtype=None."
            )
    mode = getattr(args, "vllm_importance_sampling_mode", "")
    if args.loss_type == "vespo" and mode.startswith("sequence"):
        raise ValueError(
            f"loss_type='vespo' corrects whole rollouts by itself, and vllm_importance_sampling_mode={mode} would do "
            "so again. Use token_truncate or token_mask."
        )
    refuse_other_sampling(args, ("the sampler's log-probs", "sampler_dtype=None"))


def refuse_band(args: Any) -> None:
    """Raises ValueError for a `geometric_ratio_band` that is none, or without what it reads. args: as above."""
    band = getattr(args, "geometric_ratio_band", None)
    if band is None:
        return
    numbers = isinstance(band, list | tuple) and len(band) == 2 and all(isinstance(x, int | float) for x in band)
    if not numbers or not 0 < band[0] < 1 < band[1]:
        raise ValueError(
            f"geometric_ratio_band={band} must be two numbers [low, high] around 1, or None. Try "
            "geometric_ratio_band=[0.99,1.01]."
        )
    if not getattr(args, "use_vllm", False) and getattr(args, "sampler_dtype", None) is None:
        raise ValueError(
            "geometric_ratio_band compares the policy that trains with a sampler of other numerics, and use_vllm=False "
            "samples with the policy itself. Use use_vllm=True (or sampler_dtype=bfloat16), or "
            "geometric_ratio_band=None."
        )
    if not getattr(args, "vllm_importance_sampling_correction", True):
        raise ValueError(
            "vllm_importance_sampling_correction=False leaves out the policy's log-probs, and geometric_ratio_band "
            "compares them with the sampler's. Use vllm_importance_sampling_correction=True, or "
            "geometric_ratio_band=None."
        )


CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # of TRL's, those of the clipped ratio


def refuse_improvement(args: Any) -> None:
    """Raises ValueError where an improvement update could not be what it says. args: as in `refuse_options`."""
    loss_type, iterations = getattr(args, "loss_type", "dapo"), getattr(args, "num_iterations", 1)
    if iterations != 1:
        raise ValueError(
            f"num_iterations={iterations} makes several updates on a batch, and the improvement update weighs one by "
            "the batch after it. Use num_iterations=1, or no improvement=."
        )
    generation, accumulation = (
        getattr(args, name, None) for name in ("steps_per_generation", "gradient_accumulation_steps")
    )
    if generation != accumulation:
        raise ValueError(
            f"steps_per_generation={generation} beside gradient_accumulation_steps={accumulation}: the improvement "
            "update weighs one optimizer step for each batch of rollouts. Make the two equal, or use no improvement=."
        )
    if loss_type not in CLIPPED_LOSSES:
        raise ValueError(
            f"loss_type='{loss_type}' has no clipped ratio, which holds the improvement update near the policy that "
            f"sampled its batch. Use one of {', '.join(CLIPPED_LOSSES)}, or no improvement=."
        )
    if (threshold := getattr(args, "off_policy_mask_threshold", None)) is not None:
        raise ValueError(
            f"off_policy_mask_threshold={threshold} keeps or drops rollouts by the sign of their advantage, which the "
            "improvement update may turn. Use off_policy_mask_threshold=null, or no improvement=."
        )
    for option in ("use_vllm", "fp16"):
        if getattr(args, option, False):
            raise ValueError(
                f"{option}=True has not been tried with improvement updates: they change the weights between the "
                f"rollouts and their own update. Use {option}=False, or no improvement=."
            )


def refuse_other_sampling(args: Any, reader: tuple[str, str]) -> None:
    """Raises ValueError where tokens are not drawn from the softmax at the temperature. reader: see below."""
    generation = dict(args.generation_kwargs or {})
    if "temperature" in generation or generation.get("do_sample") is False:
        raise ValueError(
            f"generation_kwargs={generation} sets how tokens are drawn behind the trainer's back. Use temperature= "
            "for the temperature; greedy decoding leaves nothing to learn from."
        )
    options = {name: getattr(args, name) for name in NEUTRAL_SAMPLING} | generation
    if getattr(args, "use_vllm", False) and options["top_k"] == -1:
        options["top_k"] = 0  # vLLM takes both for all tokens, transformers 0 alone
    refuse_generation(options, "", NEUTRAL_SAMPLING, reader)
    refuse_generation(generation, "generation_kwargs", reader=reader)


def refuse_generation(
    options: dict, source: str, neutral: dict = OTHER_SAMPLING, reader: tuple[str, str] = SCORE_NORMS
) -> None:
    """Raises ValueError for a sampling option that is not neutral.

    source: where it stands. reader: what is of the softmax at the temperature, and what to use instead of it.
    """
    what, instead = reader
    for name, value in neutral.items():
        if (chosen := options.get(name)) not in (value, None):
            where = f" in {source}" if source else ""
            raise ValueError(
                f"{name}={chosen}{where}: {what} are those of the softmax at the temperature, and with {name} "
                f"that is not the distribution sampled from. Use {name}={value}, or {instead}."
            )


# ---- the batches of a step


CHUNKS = 4  # of a batch, by length: its rows of one chunk; more would save little padding and make the matrices small


class Batches(NamedTuple):
    """How one step is divided. A forward with its backward pass is one micro-batch.

    Args:
        local: rollouts of one process per step.
        forward: rollouts of one forward.
        accumulation: forwards of one process per step.
    """

    local: int
    forward: int
    accumulation: int


def batches(prompts_per_step: int, group_size: int, processes: int, rollouts_per_forward: int | None) -> Batches:
    """Divides the rollouts of a step over processes and forwards.

    rollouts_per_forward: None, or more than a process has, means all of its rollouts at once.

    Raises:
        ValueError: a division leaves a rest. The text names the keys of a run (conf/config.yaml).
    """
    rollouts = prompts_per_step * group_size
    if rollouts % processes:
        fit = processes // math.gcd(processes, group_size)
        raise ValueError(
            f"prompts_per_step={prompts_per_step} x group_size={group_size} = {rollouts} rollouts do not divide over "
            f"{processes} processes. Try prompts_per_step={max(fit, prompts_per_step // fit * fit)}."
        )
    local, forward = rollouts // processes, rollouts_per_forward
    if forward is None:
        return Batches(local, local, 1)
    if type(forward) is not int or forward < 1 or (forward < local and local % forward):
        most = forward if type(forward) is int else 1
        fit = max((d for d in range(1, local + 1) if local % d == 0 and d <= most), default=1)
        raise ValueError(
            f"model.rollouts_per_forward={forward} must divide the {local} rollouts of a process. "
            f"Try model.rollouts_per_forward={fit}."
        )
    forward = min(forward, local)
    return Batches(local, forward, local // forward)


def refuse_broken_groups(batches: Batches, group_size: int, processes: int, fix: str | None = None) -> None:
    """Raises ValueError unless a step has two micro-batches or more, each of whole prompt groups.

    Gradient noise is measured on them. fix: what to do, for a caller that knows other options than the keys of a run.
    """
    local, forward, accumulation = batches
    if forward % group_size == 0 and accumulation * processes > 1:
        return
    groups = local // group_size  # whole ones of a process
    fits = [k * group_size for k in range(1, groups // 2 + 1) if local % (k * group_size) == 0]
    keys = f"model.rollouts_per_forward={fits[-1]}" if fits else f"prompts_per_step={4 * processes}"
    raise ValueError(
        f"measure_gradient_noise compares micro-batches of whole prompt groups; a step has "
        f"{accumulation * processes} of {forward} rollouts in groups of {group_size}. {fix or f'Try {keys}.'}"
    )
