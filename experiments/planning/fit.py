"""Whether a run fits the memory of its GPUs, from its configuration, before anything is loaded or submitted.

Called for every run with `card=`, else with the GPU that is here; for SLURM, where neither is known, with the largest
card of conf/plan.yaml; and by experiments/plan.py. Imports no torch.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from experiments.planning.architectures import architecture_of
from experiments.planning.memory import SAMPLES_HERE, Step, moments, needed, peak, state, vllm_room, vllm_weights
from experiments.running.build import has_reference, is_tiny
from experiments.running.command_line import near_miss
from otb.errors import RunError

ASSUMPTIONS = Path(__file__).resolve().parents[2] / "conf" / "plan.yaml"
SYNC_EACH_FORWARD = "accelerator_config.gradient_accumulation_kwargs.sync_each_batch"  # of trl.GRPOConfig
MORE_GPUS = (2, 4, 8, 16, 32, 64)  # that a fix may name
FEWER_ROWS = (64, 16, 4)  # generated at a time, that a fix may name
GPU_OPTIONS = ("gpus_per_node", "gpus_per_task", "gres")  # of SLURM's launchers; none of them: no GPU
TOLERANCE = 0.1  # of the card: the formulas may predict so much more than is needed (docs/plan.md)
USUAL_SHARE = 0.3
BYTES = {"float32": 4, "bfloat16": 2}
SERVER_SHARE = 0.9  # of a GPU's memory, the default of `trl vllm-serve`


@cache
def assumptions() -> DictConfig:
    """Returns conf/plan.yaml; callers must not change it."""
    return OmegaConf.load(ASSUMPTIONS)


# ---- refusals


def check_card(cfg: DictConfig, processes: int | None = None, found: float | None = None) -> None:
    """Raises RunError for a `card` that conf/plan.yaml does not know, or that the run cannot fit.

    found: bytes of the GPU of this machine, used where `card` is null; None where the run is for another machine.
    """
    cards = assumptions().cards
    if cfg.card is None:
        if found is not None:
            refuse_if_it_cannot_fit(cfg, found, processes)
    elif cfg.card in cards:
        advice = " Or card=null, to try it all the same."
        refuse_if_it_cannot_fit(cfg, cards[cfg.card].memory_gb * 1e9, processes, advice)
    else:
        raise RunError(
            f"card={cfg.card} is no GPU of conf/plan.yaml.{near_miss(cfg.card, cards)} Known: {', '.join(cards)}. Add "
            "yours there, or use card=null."
        )


def check_largest_card(cfg: DictConfig, processes: int) -> None:
    """Raises RunError for a run of SLURM without a `card` that cannot fit the largest of conf/plan.yaml.

    cfg: with the launcher, `cfg.hydra`. Nothing is raised for model=tiny, nor where no GPU is asked for.
    """
    asked = any(cfg.hydra.launcher.get(key) for key in GPU_OPTIONS) and not cfg.trainer.get("use_cpu")
    if cfg.card is not None or is_tiny(cfg.model) or not asked:
        return
    cards = assumptions().cards
    largest = max(cards, key=lambda card: cards[card].memory_gb)
    advice = (
        f" With card=null this is {largest}, the largest of conf/plan.yaml; a larger one can be added there, for "
        "card=NAME."
    )
    refuse_if_it_cannot_fit(cfg, cards[largest].memory_gb * 1e9, processes, advice)


def refuse_if_it_cannot_fit(
    cfg: DictConfig, card_memory_bytes: float, processes: int | None = None, advice: str = ""
) -> None:
    """Raises RunError where the predicted peak of a run is TOLERANCE above the memory of its GPU.

    processes: of the run; None for those that SLURM's launcher of a composed sweep (`cfg.hydra`) starts, else `gpus`.
    advice: the end of the message. Nothing is raised for a model whose architecture is not known; a line says that its
    memory was not checked.
    """
    try:
        step = step_of(cfg, card_memory_bytes, processes)
    except RunError as error:
        _note_unchecked(str(error))
        return
    if reason := why_not(step, reserve=-TOLERANCE * card_memory_bytes):
        raise RunError(f"model.name={cfg.model.name}: {reason}{advice}")


@cache  # once for all runs of a sweep
def _note_unchecked(reason: str) -> None:
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"note: memory was not checked: {reason}", file=sys.stderr)


def why_not(step: Step, reserve: float = 0.0) -> str | None:
    """Returns why the step does not fit a GPU of `step.card` bytes, with a fix; None where it fits.

    reserve: bytes that must stay free; a negative number allows as many more than the card has.
    """
    card, spare = step.card / 1e9, max(reserve, 0)
    if step.sampler == "vllm" and vllm_room(step) < 1:
        return (
            f"rollouts_by.memory_share={step.memory_share} of {card:.0f} GB does not hold vLLM's copy of the policy "
            f"({vllm_weights(step) / 1e9:.1f} GB a GPU) and the cache of one rollout of {step.width} tokens, and the "
            f"trainer leaves {largest_share(step, spare)}. Use rollouts_by.memory_share=null for as much as it leaves, "
            "set rollouts_by.tensor_parallel, or use more GPUs."
        )
    if needed(step) + reserve <= step.card:
        return None
    gpus = f"over {step.processes} GPUs" if step.processes > 1 else "on one GPU"
    fix = fitting_change(step, spare) or "a smaller model, LoRA (model.lora.r=32) or shorter responses"
    return (
        f"needs {needed(step) / 1e9:.0f} GB a GPU under parallel={step.parallel} {gpus} ({state(step) / 1e9:.0f} GB of "
        f"it weights, gradients and optimizer; the peak is at: {peak(step)[0]}); the card has {card:.0f}"
        + (f", {spare / 1e9:.0f} of them in reserve" if spare else "")
        + f". Try {fix}."
    )


# ---- what would fit


def fitting_change(step: Step, reserve: float = 0.0) -> str | None:
    """Returns the keys to set so that the step fits; None where none of the changes tried does.

    The fewest GPUs come first, then the fewest changes, then the largest forwards.
    """
    options = [(changed_keys(step, option), option) for option in other_steps(step, reserve)]
    for keys, option in sorted(options, key=lambda pair: (pair[1].processes, len(pair[0]), -pair[1].forward)):
        if needed(option) + reserve <= step.card and (option.sampler != "vllm" or vllm_room(option) >= 1):
            return " ".join(keys)
    return None


def other_steps(step: Step, reserve: float) -> Iterator[Step]:
    """Yields the same step of a run on more GPUs, under fsdp2, sampled by vLLM, in smaller batches."""
    rollouts = step.rollouts * step.processes
    for processes, parallel, sampler, sync in itertools.product(
        (step.processes, *(n for n in MORE_GPUS if n > step.processes)),
        dict.fromkeys((step.parallel, "fsdp2")),
        dict.fromkeys((step.sampler, "vllm")),
        dict.fromkeys((step.sync_each_forward, True)),
    ):
        sharded = parallel != "ddp"
        if rollouts % processes or (sharded and (processes == 1 or sampler in SAMPLES_HERE)):
            continue
        if sync != step.sync_each_forward and parallel != "fsdp2":
            continue
        sleep = step.sleep or sampler != step.sampler  # conf/rollouts_by/vllm.yaml lets vLLM sleep
        moved = replace(
            step, processes=processes, parallel=parallel, sampler=sampler, sync_each_forward=sync, sleep=sleep,
            rollouts=rollouts // processes,
        )  # fmt: skip
        if sampler == "vllm" and vllm_room(moved) < 1:
            moved = replace(moved, memory_share=largest_share(moved, reserve))
        forwards = [n for n in range(1, min(step.forward, moved.rollouts) + 1) if moved.rollouts % n == 0]
        rows = dict.fromkeys((step.rows, *FEWER_ROWS)) if moved.generates else [step.rows]
        for forward, generated in itertools.product(forwards, rows):
            yield replace(moved, forward=forward, rows=generated)


def changed_keys(old: Step, new: Step) -> list[str]:
    """Returns `key=value` for what differs, as it is typed."""
    fields = {
        "parallel": "parallel",
        "gpus": "processes",
        "rollouts_by": "sampler",
        "rollouts_by.rows": "rows",
        "rollouts_by.memory_share": "memory_share",
        "model.rollouts_per_forward": "forward",
        f"parallel.trainer.{SYNC_EACH_FORWARD}": "sync_each_forward",
    }
    changed = {key: getattr(new, name) for key, name in fields.items() if getattr(old, name) != getattr(new, name)}
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in changed.items()]


def largest_share(step: Step, reserve: float) -> float:
    """Returns the largest memory_share, in twentieths, that the trainer leaves whenever vLLM holds it."""
    held = moments(replace(step, memory_share=0.0))
    sampling_alone = step.sleep and step.sampler == "vllm"
    beside = max(sum(parts.values()) for parts in ([held["sampling"]] if sampling_alone else held.values()))
    return twentieths((step.card - reserve - beside) / step.card)


def twentieths(share: float) -> float:
    """Returns the largest twentieth that is not above `share`, 0 at least."""
    return max(0, math.floor(20 * share)) / 20


def fewest_gpus(step: Step) -> int:
    """Returns the least number of GPUs over which one copy of the policy and the cache of a rollout fit vLLM's share.

    It divides the processes and the attention's heads; 1 where no such number is enough, which `why_not` then says.
    """
    numbers = [n for n in range(1, step.processes + 1) if step.processes % n == step.architecture.heads % n == 0]
    return next((n for n in numbers if vllm_room(replace(step, tensor_parallel=n)) >= 1), 1)


# ---- from a configuration


def vllm_share(cfg: DictConfig, card_memory_bytes: float | None, processes: int | None = None) -> float:
    """Returns `rollouts_by.memory_share`, or where it is null what the policy beside vLLM leaves of the GPU.

    The trainer shares the GPU with vLLM; in an evaluation one copy of the weights. TOLERANCE of the GPU stays free.
    USUAL_SHARE, TRL's default, where GPU (None) or architecture are unknown. processes: as in `step_of`.
    """
    share = OmegaConf.select(cfg, "rollouts_by.memory_share")
    if share is not None or card_memory_bytes is None:
        return USUAL_SHARE if share is None else float(share)
    try:
        if "prompts_per_step" in cfg:
            return step_of(cfg, card_memory_bytes, processes).memory_share
        weights = BYTES[cfg.model.dtype] * architecture_of(str(cfg.model.name), cfg.model.get("revision")).parameters
    except RunError:
        return USUAL_SHARE
    return twentieths(1 - TOLERANCE - weights / card_memory_bytes)


def vllm_gpus(cfg: DictConfig, card_memory_bytes: float | None, processes: int | None = None) -> int:
    """Returns `rollouts_by.tensor_parallel`, or where it is null the `fewest_gpus` that fit.

    1 where GPU (None) or architecture are unknown, and in an evaluation, whose samples depend on it.
    """
    given = cfg.rollouts_by.tensor_parallel
    if given is not None or card_memory_bytes is None or "prompts_per_step" not in cfg:
        return given or 1
    try:
        return step_of(cfg, card_memory_bytes, processes).tensor_parallel
    except RunError:
        return 1


def step_of(
    cfg: DictConfig, card_memory_bytes: float, processes: int | None = None, prompt_tokens: int | None = None
) -> Step:
    """Returns what the memory of a process depends on, from a run's composed configuration.

    processes: None for those of `processes_of`. prompt_tokens: where max_prompt_length is null; None for
    conf/plan.yaml's.

    Raises:
        RunError: the architecture of the model is not known.
    """
    processes = processes or processes_of(cfg)
    rollouts = max(1, cfg.prompts_per_step * cfg.group_size // processes)
    lora, sampler = cfg.model.get("lora") or {}, cfg.rollouts_by
    targets = lora.get("target_modules")
    share = SERVER_SHARE if sampler.name == "vllm_server" else sampler.get("memory_share")
    trainers = (cfg.trainer, cfg.parallel.trainer)
    step = Step(
        architecture=architecture_of(str(cfg.model.name), cfg.model.get("revision")),
        dtype=cfg.model.dtype,
        rollouts=rollouts,
        forward=min(cfg.model.rollouts_per_forward or rollouts, rollouts),
        prompt=cfg.max_prompt_length or prompt_tokens or assumptions().prompt_tokens,
        response=cfg.task.max_completion_length,
        lora_rank=lora.get("r"),
        lora_targets=None if targets is None or isinstance(targets, str) else tuple(targets),
        parallel=cfg.parallel.name,
        processes=processes,
        checkpointing=cfg.trainer.get("gradient_checkpointing", True),
        sync_each_forward=any(OmegaConf.select(trainer, SYNC_EACH_FORWARD) for trainer in trainers),
        sampler=sampler.name,
        rows=sampler.get("rows"),
        tensor_parallel=sampler.get("tensor_parallel") or 1,
        memory_share=float(share or 0.0),
        sleep=bool(sampler.get("sleep")),
        card=float(card_memory_bytes),
        reference=has_reference(cfg),
    )
    if sampler.name == "vllm" and share is None:
        step = replace(step, memory_share=largest_share(step, TOLERANCE * step.card))
    if sampler.name == "vllm" and sampler.tensor_parallel is None and cfg.task.get("max_turns") is None:
        step = replace(step, tensor_parallel=fewest_gpus(step))  # TRL allows for one alone with tools
    return step


def processes_of(cfg: DictConfig) -> int:
    """Returns the processes of a run, one per GPU: nodes x tasks_per_node of SLURM's launchers, else `gpus`, else 1."""
    if nodes := OmegaConf.select(cfg, "hydra.launcher.nodes"):
        return int(nodes) * int(cfg.hydra.launcher.tasks_per_node)
    return int(cfg.gpus or 1)
