"""Prints a plan: tables of tokens and hours, of memory by part and moment, of disk, and the assumptions behind them."""

from __future__ import annotations

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Column, Table

from experiments.planning.costs import disk, evaluation_tokens, hours, response_tokens
from experiments.planning.fit import largest_share, why_not
from experiments.planning.memory import (
    PARTS,
    Step,
    kv_bytes_per_token,
    logits_avoided,
    moments,
    needed,
    peak,
    vllm_room,
)
from experiments.planning.sizes import Plan, card_of, kept_rollouts, rates_of

GB = 1e9
GROUP_BASELINES = ("group_mean", "grpo", "rloo")


def print_plan(plans: list[Plan], assumptions: DictConfig) -> None:
    """Prints to the terminal, at its width, or to a file or pipe with 120 columns."""
    console = Console()
    console = console if console.is_terminal else Console(width=120)
    step = max((entry.step for entry in plans), key=needed)
    cfg = plans[0].cfg
    lora = f", LoRA of rank {step.lora_rank}: {step.trained / 1e6:,.1f} M trained" if step.lora_rank else ""
    console.print(
        f"[bold]{cfg.model.name}[/bold]: {number(step.architecture.parameters)} parameters{lora}. "
        f"{step.processes} x {assumptions.card}, parallel={step.parallel}, rollouts_by={step.sampler}, "
        f"{cfg.steps} steps of {cfg.prompts_per_step} prompts, up to {step.prompt} + {step.response} tokens a rollout."
    )
    console.print(time_table(plans, assumptions))
    console.print(claimed(plans, assumptions), memory_table(step), *facts(step, assumptions), sep="\n")
    console.print(disk_table(plans, assumptions), assumed(plans, assumptions), sep="\n")


def number(value: float) -> str:
    """Returns a number with a word for its size: 7.62 B, 134.5 M."""
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:,.2f} {name}" if size > 1e6 else f"{value / size:,.1f} {name}"
    return f"{value:,.0f}"


def hour(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def time_table(plans: list[Plan], assumptions: DictConfig) -> Table:
    """Returns a row per arm and point of the sweep: tokens and GPU-hours of one run, and of all its seeds."""
    longest = max(len(entry.label) for entry in plans)
    table = Table(
        *("arm", Column("setting", min_width=min(longest, 40)), "runs", "tokens sampled", "in evaluation"),
        *("sampling", "training", "evaluation", "a run", "all runs"),
        title="Tokens, and GPU-hours, of a run",
    )
    card, rates, total = card_of(assumptions), rates_of(assumptions), 0.0
    for entry, arm, run in [(plan, arm, run) for plan in plans for arm, run in plan.runs.items()]:
        spent, evaluated = hours(entry.step, run, card, rates), evaluation_tokens(run)
        of_all = None if spent.total is None else spent.total * entry.seeds
        total = None if of_all is None or total is None else total + of_all
        table.add_row(
            *(arm, entry.label or "-", str(entry.seeds), number(response_tokens(run))),
            *("?" if evaluated is None else number(evaluated), hour(spent.sampling), hour(spent.training)),
            *(hour(spent.evaluation), hour(spent.total), hour(of_all)),
        )
    days = "" if total is None else f" = {total / 24 / plans[0].step.processes:,.1f} days of these GPUs"
    table.caption = f"all runs: {hour(total)} GPU-hours{days}"
    return table


def claimed(plans: list[Plan], assumptions: DictConfig) -> str:
    """Returns what the paper's claim would mean in GPU-hours, for the costliest setting of the recipe.

    To the same performance OTB would need (1 - saving) of the tokens of a group baseline, at the same tokens a step.
    """
    uses_tools = plans[-1].cfg.task.get("max_turns") is not None
    saving = assumptions.claimed_saving["tools" if uses_tools else "single_turn"]
    card, rates = card_of(assumptions), rates_of(assumptions)
    entry = max(plans, key=lambda plan: plan.step.rollouts * plan.step.processes * plan.cfg.steps)
    spent = {arm: hours(entry.step, run, card, rates).total for arm, run in entry.runs.items()}
    otb = next((arm for arm in spent if arm.startswith("otb")), next(iter(spent)))
    other = next((arm for arm in spent if arm in GROUP_BASELINES), otb)
    where = f" at {entry.label}" if entry.label else ""
    claim = f"Claimed by the paper: {saving:.0%} fewer tokens to the same performance"
    if spent[otb] is None or spent[other] is None:
        return f"{claim}; the GPU-hours of these runs are not known."
    needed = (1 - saving) * spent[otb]
    of_other = f"{other}'s run" if other != otb else "a group baseline's run of as many GPU-hours"
    return (
        f"{claim}. What {of_other}{where} reaches in {hour(spent[other])} GPU-hours, OTB would reach in "
        f"{hour(needed)}: {hour(spent[other] - needed)} fewer, if the claim holds."
    )


def memory_table(step: Step) -> Table:
    """Returns a table of each part at each moment of a step; the moment of the peak is bold."""
    at = moments(step)
    where, _ = peak(step)
    names = [part for part in PARTS if any(parts.get(part) for parts in at.values())]
    unit, name_of_unit = (GB, "GB") if sum(at[where].values()) >= GB else (1e6, "MB")
    table = Table(
        f"{name_of_unit} per GPU at", *(Column(name.replace("_", " "), justify="right") for name in [*names, "sum"])
    )
    table.title = "Memory of one GPU"
    for moment, parts in at.items():
        cells = [f"{parts.get(name, 0) / unit:.1f}" for name in names]
        label = f"[bold]{moment}[/bold]" if moment == where else moment
        table.add_row(label, *cells, f"{sum(parts.values()) / unit:.1f}")
    return table


def facts(step: Step, assumptions: DictConfig) -> list[str]:
    """Returns lines on the fit, the logits that are never made, and the KV cache."""
    reserve = assumptions.reserve_gb * GB
    reason = why_not(step, reserve)
    fit = f"It fits: {needed(step) / GB:.1f} GB of {step.card / GB:.0f}, {assumptions.reserve_gb} of them in reserve."
    lines = [fit if reason is None else f"[bold]It does not fit:[/bold] {reason}"]
    lines.append(
        f"Never made: {logits_avoided(step) / GB:.1f} GB of float32 logits a forward of {step.forward} rollouts. "
        f"KV cache: {kv_bytes_per_token(step.architecture) / 1e3:.0f} kB a token in bfloat16."
    )
    if not step.generates:
        engine = f"{step.tensor_parallel} GPU" + ("s" if step.tensor_parallel > 1 else "")
        lines.append(f"vLLM's cache holds {vllm_room(step):.0f} rollouts of full length at a time on {engine}.")
    if step.sampler == "vllm":
        free = largest_share(step, reserve)
        lines.append(f"rollouts_by.memory_share={step.memory_share} could be up to {free} beside the trainer.")
    return lines


def disk_table(plans: list[Plan], assumptions: DictConfig) -> Table:
    """Returns GB of a run's directory by what they are for, of the largest run, and of all runs that are kept."""
    largest: dict[str, float] = {}
    all_runs = 0.0
    for entry, run in [(plan, run) for plan in plans for run in plan.runs.values()]:
        parts = disk(entry.step, run, kept_rollouts(entry.cfg), assumptions.checkpoint_rollout_bytes)
        all_runs += entry.seeds * sum(size for name, size in parts.items() if name != "while one is written")
        largest = max(largest, parts, key=lambda sizes: sum(sizes.values()))
    table = Table(*largest, "all runs, ended", title="Disk, GB of a run")
    table.add_row(*(f"{size / GB:,.1f}" for size in largest.values()), f"{all_runs / GB:,.1f}")
    return table


def assumed(plans: list[Plan], assumptions: DictConfig) -> str:
    """Returns what the numbers rest on, with the keys that replace it."""
    step, card = plans[0].step, assumptions.cards[assumptions.card]
    training, sampling = ["training_utilization"], ["sampling_efficiency", "hf_seconds_per_token"]
    if assumptions.training_tokens_per_second is not None:
        training = ["training_tokens_per_second"]
    if assumptions.sampling_tokens_per_second is not None:
        sampling = ["sampling_tokens_per_second"]
    names = ["response_share", *training, *sampling, "reserve_gb"]
    lines = [
        "Assumed, not measured (replace them on the command line; conf/plan.yaml explains each):",
        f"  {assumptions.card}: {card.memory_gb} GB, {card.tflops} bfloat16 TFLOPS, {card.bandwidth_gb_s} GB/s; "
        f"prompts of {step.prompt} tokens",
        "  " + " ".join(f"{name}={assumptions[name]}" for name in names),
        "Not counted: tools, grading, handing weights to vLLM, loading, writing checkpoints.",
    ]
    if step.dtype != "bfloat16":
        lines.append(f"Times are those of bfloat16; model.dtype={step.dtype} is slower.")
    return "\n".join(lines)
