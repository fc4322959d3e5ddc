"""Checks which options make sense together: those of trl.GRPOConfig with a baseline, and the batches of a step.

OTBTrainer calls `refuse` before it loads a model, and so does the command line before it imports torch: this file
imports neither torch nor trl.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from otb import baselines
from otb.refusals import Options, Taken
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
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff", "presence_penalty", "frequency_penalty"), 0.0),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty"), 1.0),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens", "min_tokens"), 0),
    "num_beams": 1,
    **dict.fromkeys(
        (
            *("top_h", "penalty_alpha", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
            *("guidance_scale", "watermarking_config"),
            *("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs"),  # of vLLM
        )
    ),
}

METHODS = ("lr_schedule", "token_weights", "improvement", "auxiliary")  # arguments of OTBTrainer that may be None
SAMPLER_DTYPES = ("bfloat16",)
NOT_BESIDE_A_COPY = ("use_vllm", "use_transformers_continuous_batching", "cast_lm_head_to_fp32", "bf16", "fp16")


def refuse(options: Options) -> None:
    """Raises ValueError for options that cannot go together, in the words of whoever set them.

    options: fields of a GRPOConfig, and the arguments of OTBTrainer by their names.
    """
    _refuse_baseline(options)
    _refuse_per_token(options)
    _refuse_sampler_copy(options)
    refuse_other_sampling(options)
    _refuse_band(options)
    if options.measure_gradient_noise:
        _refuse_noise(options)
    for method in filter(None, (getattr(options, name) for name in METHODS)):
        method.refuse(options)


def _refuse_baseline(options: Options) -> None:
    baseline, group_size = options.baseline, options.num_generations
    refuse_arguments(baseline)
    name, smallest = baselines.name_of(baseline), baselines.min_group_size_of(baseline)
    if group_size is not None and group_size < smallest:
        rule = f": baseline {name} compares rollouts of one prompt and needs at least {smallest}"
        other = ("a baseline that works with one rollout (none, otb, energy_probe)",) if group_size == 1 else ()
        raise options.refusal("num_generations", rule, ("num_generations", smallest), *other)
    rule = "normalises each reward by its group, which is a baseline of its own"
    options.refuse_others((Taken("multi_objective_aggregation", ("sum_then_normalize",), rule),))
    if baselines.needs_of(baseline) & baselines.EXACT_NORMS:
        options.refuse_sharding(f"baseline={name} reads whole gradients", "a baseline without exact norms")


def _refuse_per_token(options: Options) -> None:
    per_token = baselines.is_per_token(options.baseline)
    if not per_token and options.token_weights is None:
        return
    name = baselines.name_of(options.baseline) if per_token else "token_weights"
    rule = f"reads one advantage of a whole rollout by its sign; {name} has one per token"
    options.refuse_others((Taken("off_policy_mask_threshold", (None,), rule),))
    if options.loss_type == "vespo":
        raise options.refusal("loss_type", rule, ("loss_type", "dr_grpo"), ("loss_type", "dapo"))


def _refuse_sampler_copy(options: Options) -> None:
    if options.sampler_dtype is None:
        return
    off, copy = ("sampler_dtype", None), options.says("sampler_dtype")
    rule = f"is not one of {', '.join(SAMPLER_DTYPES)}"
    options.refuse_others((Taken("sampler_dtype", SAMPLER_DTYPES, rule),), off)
    options.refuse_sharding(f"{copy} copies the whole policy", off)
    rule = (
        f"beside {copy}: the sampler is a bfloat16 copy of a float32 policy; nothing else may sample for it or cast it"
    )
    options.refuse_others((Taken(option, (False,), rule) for option in NOT_BESIDE_A_COPY), off)
    if options.loss_type == "vespo":
        rule = f"would correct whole rollouts once more, as {options.says('loss_type')} does so by itself"
        options.refuse_others((Taken("vllm_importance_sampling_mode", ("token_truncate", "token_mask"), rule),))


def _refuse_band(options: Options) -> None:
    name, band, off = "geometric_ratio_band", options.geometric_ratio_band, ("geometric_ratio_band", None)
    if band is None:
        return
    numbers = isinstance(band, list | tuple) and len(band) == 2 and all(isinstance(x, int | float) for x in band)
    if not numbers or not 0 < band[0] < 1 < band[1]:
        raise options.refusal(name, "must be two numbers [low, high] around 1", (name, (0.99, 1.01)), off)
    if not options.use_vllm and options.sampler_dtype is None:
        same = options.says("use_vllm", False)
        rule = f"compares the policy with a sampler of other numerics, and {same} samples with the policy itself"
        raise options.refusal(name, rule, ("use_vllm", True), ("sampler_dtype", SAMPLER_DTYPES[0]), off)
    rule = f"leaves out the policy's log-probs, which {name} compares with the sampler's"
    options.refuse_others((Taken("vllm_importance_sampling_correction", (True,), rule),), off)


# ---- tokens that are not drawn from the softmax at the temperature


def refuse_other_sampling(options: Options) -> None:
    """Raises ValueError where options change how tokens are drawn, and something reads the softmax they come from."""
    generation = dict(options.generation_kwargs or {})
    if "temperature" in generation or generation.get("do_sample") is False:
        rule = "sets how tokens are drawn behind the trainer's back; greedy decoding leaves nothing to learn from"
        for _ in _readers(options):
            raise options.refusal("generation_kwargs", rule, f"{options.key('temperature')}= for the temperature")
    drawn = {name: getattr(options, name) for name in NEUTRAL_SAMPLING} | generation
    if options.use_vllm and drawn["top_k"] == -1:
        drawn["top_k"] = 0  # vLLM takes both for all tokens, transformers 0 alone
    _refuse_drawn(options, drawn, NEUTRAL_SAMPLING)
    _refuse_drawn(options, generation, OTHER_SAMPLING, f" in {options.key('generation_kwargs')}")


def refuse_generation_config(options: Options, config: Mapping[str, Any]) -> None:
    """Raises ValueError where the generation_config.json of the model itself does so. config: what it holds."""
    _refuse_drawn(options, config, OTHER_SAMPLING, " in the model's generation_config.json")


def _readers(options: Options) -> Iterator[tuple[str, str]]:
    """Yields what reads the softmax at the temperature, and what to use instead of it."""
    if options.log_energy or options.measure_gradient_noise or baselines.needs_scores(options.baseline):
        yield "the score norms", "a baseline without energy"
    if options.sampler_dtype is not None:
        yield "the sampler's log-probs", options.says("sampler_dtype", None)


def _refuse_drawn(options: Options, drawn: Mapping[str, Any], neutral: Mapping[str, Any], where: str = "") -> None:
    """Raises ValueError for an option of sampling that is not neutral. where: the place of `drawn`, for the message."""
    for what, instead in _readers(options):
        for name, value in neutral.items():
            if (chosen := drawn.get(name)) not in (value, None):
                setting, fix = f"{name}={chosen}{where}", f"{name}={value} there"
                if not where:
                    setting, fix = options.says(name, chosen), options.says(name, value)
                raise ValueError(
                    f"{setting}: {what} are those of the softmax at the temperature, and with {name} that is not the "
                    f"distribution sampled from. Use {fix}, or {instead}."
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


def batches(
    prompts_per_step: int,
    group_size: int,
    processes: int,
    rollouts_per_forward: int | None,
    of: str = "rollouts of a process",
) -> Batches:
    """Divides the rollouts of a step over processes and forwards.

    rollouts_per_forward: None, or more than a process has, means all of its rollouts at once. of: what they are, for
    the message.

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
            f"model.rollouts_per_forward={forward} must divide the {local} {of}. Try model.rollouts_per_forward={fit}."
        )
    forward = min(forward, local)
    return Batches(local, forward, local // forward)


def _refuse_noise(options: Options) -> None:
    """Refuses a step without two micro-batches of whole prompt groups, on which gradient noise is measured."""
    noise = options.says("measure_gradient_noise")
    options.refuse_sharding(f"{noise} reads whole gradients", ("measure_gradient_noise", False))
    if options.fp16:
        raise options.refusal("fp16", f"scales the gradients that {noise} reads", ("bf16", True))
    forward, accumulation, group_size = (
        getattr(options, name)
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    )
    batches = accumulation * options.world_size
    if forward % group_size == 0 and batches > 1:
        return
    local = forward * accumulation
    fits = [size for size in range(group_size, local // 2 + 1, group_size) if local % size == 0]
    fix = options.batch(fits[-1], local // fits[-1]) if fits else options.batch(group_size, 2)
    raise ValueError(
        f"{noise} compares micro-batches of whole prompt groups; a step has {batches} of {forward} rollouts in groups "
        f"of {group_size}. Use {fix}."
    )
