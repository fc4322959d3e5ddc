"""Collects the prompt groups of some runs for one page: the last steps first, until the page is full."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from analysis.arms import arm_name, colour, label, shipped_baselines
from analysis.rollouts.pack import MAX_GROUPS, MAX_TOKENS, blob, bounded, facts, token_count
from analysis.rollouts.read import Strings, read_groups
from analysis.runs.read_run import find_runs
from analysis.runs.rows import flat_cells, read_mapping, yaml_mapping
from analysis.runs.samples import read_samples
from otb.errors import RunError
from otb.records import RunDirectory, sample_step


@dataclass
class Collection:
    """What a page shows. The groups stand by run, step and prompt; `blobs` has the numbers of each."""

    runs: list[dict]
    groups: list[dict] = field(default_factory=list)
    blobs: list[str] = field(default_factory=list)
    strings: Strings = field(default_factory=Strings)
    notes: list[str] = field(default_factory=list)
    tokens: int = 0


def collect(folders: list[Path], steps: list[int] | None = None) -> Collection:
    """Reads the kept rollouts of runs.

    Args:
        folders: run directories, or folders of them.
        steps: only these; None for all that were kept.

    Raises:
        RunError: nothing was kept, or nothing of these steps.
    """
    runs = [run for folder in folders for run in find_runs(folder)] or folders
    runs = list(dict.fromkeys(run.resolve() for run in runs))
    files = {run: kept for run in runs if (kept := files_by_step(run))}
    if not files:
        read_samples(runs[0])  # says what is missing, and how to have it
    chosen = {}
    for run, kept in files.items():
        if shown := {step: kept[step] for step in kept if steps is None or step[0] in steps}:
            chosen[run] = shown
    if not chosen:
        there = sorted({step for kept in files.values() for step, _ in kept})
        asked = ",".join(map(str, steps or []))
        raise RunError(f"--steps={asked}: no rollouts of these were kept; kept: {', '.join(map(str, there))}.")
    collection = Collection(describe(list(chosen)))
    queue = []
    for number, kept in enumerate(chosen.values()):
        queue += [(place, number, step, kept[step]) for place, step in enumerate(reversed(kept))]
    fill(collection, sorted(queue))
    if not collection.groups:
        raise RunError(f"No rollouts could be read. {' '.join(collection.notes)}")
    return collection


def files_by_step(run: Path) -> dict[tuple[int, bool], list[Path]]:
    """Returns (step, whether it failed) -> its files, ascending. A failed step has one from each process."""
    files: dict[tuple[int, bool], list[Path]] = {}
    for file in sorted(RunDirectory(run).rollouts.glob("*.parquet"), key=lambda file: (sample_step(file), file.name)):
        files.setdefault((sample_step(file), file.name.startswith("failed")), []).append(file)
    return files


def fill(collection: Collection, queue: list[tuple]) -> None:
    """Adds the groups of (place, run, step, files) in turn, while there is room; notes say what was left out.

    place: 0 for the last step of a run, 1 for the one before. Steps of one place share the room that is left, and where
    it does not do for them, no earlier step is read.
    """
    entries: list[tuple[tuple, dict, str]] = []
    left_groups, left_steps, full_from = 0, 0, len(queue)
    for number, (place, run, (step, failed), files) in enumerate(queue):
        if place > full_from:
            left_steps += 1
            continue
        sharing = sum(entry[0] == place for entry in queue[number:])
        share = (MAX_TOKENS - collection.tokens) / sharing
        taken = 0
        try:
            for group in read_groups(files, collection.strings):
                count = token_count(group)
                fits = len(entries) < MAX_GROUPS and collection.tokens + count <= MAX_TOKENS
                if not fits or (taken and taken + count > share):
                    left_groups, full_from = left_groups + 1, place
                    continue
                cut, cuts = bounded(group)
                taken, collection.tokens = taken + count, collection.tokens + count
                name = f"{step} (failed)" if failed else str(step)
                entry = {"run": run, "step": name, "cuts": cuts} | facts(cut, group)
                entries.append(((run, step, failed, group.prompt), entry, blob(cut)))
        except RunError as error:
            collection.notes.append(f"Not read: {error}")
    keep_shown(collection, sorted(entries, key=lambda entry: entry[0]))
    if left_groups:
        more = f" and all of {left_steps} earlier steps" if left_steps else ""
        collection.notes.append(
            f"Cut: this page shows {len(entries):,} prompt groups with {collection.tokens:,} tokens, and takes "
            f"{MAX_GROUPS:,} groups and {MAX_TOKENS:,} tokens. {left_groups:,} groups of the steps that are "
            f"shown{more} are left out; --steps chooses which are shown."
        )


def keep_shown(collection: Collection, entries: list[tuple[tuple, dict, str]]) -> None:
    """Puts groups into a collection, in order, and takes the runs without any out of it."""
    shown = sorted({entry["run"] for _, entry, _ in entries})
    if len(shown) < len(collection.runs):
        collection.notes.append(f"{len(collection.runs) - len(shown)} runs have no rollouts on this page.")
    collection.runs = [collection.runs[run] for run in shown]
    collection.groups = [entry | {"run": shown.index(entry["run"])} for _, entry, _ in entries]
    collection.blobs = [numbers for *_, numbers in entries]


def describe(runs: list[Path]) -> list[dict]:
    """Returns name, label and colour of each run. Labels of two runs never are the same."""
    shipped, described = shipped_baselines(), []
    home = Path(os.path.commonpath(runs)) if len(runs) > 1 else runs[0].parent
    for run in runs:
        name = run.relative_to(home).as_posix()
        config = flat_cells(read_mapping(RunDirectory(run).config_file, yaml_mapping, []))
        arm = arm_name({"kind": "otb", "run": name} | config, shipped)
        size = config.get("group_size")
        words = [label(arm, size) if arm != "unknown" else name]
        words += [f"seed {config['seed']}"] if "seed" in config else []
        described.append({"name": name, "label": ", ".join(words), "colour": colour(arm)})
    labels = [one["label"] for one in described]
    for one in described:
        if labels.count(one["label"]) > 1:
            one["label"] += f" ({one['name']})"
    return described
