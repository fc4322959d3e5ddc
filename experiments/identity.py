"""Where a run lives, and what makes two configurations the same run. Imports no torch.

The directory of a run follows from the choices and the overrides of its command alone, so that the same command finds
it again; docs/runs.md shows the names.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from omegaconf import DictConfig

from otb.records import WHERE_AND_HOW, flatten, is_as_before, is_one_of

NAMED = ("baseline", "group_size", "seed", "task", "model")  # keys that the path shows in places of their own
LONGEST = 120  # characters of all overrides in a name; file systems end at 255 bytes
LONGEST_VALUE = 32  # characters of one value, once a name is shortened
# Keys of model and task that measurements and evaluations before them lack.
LATER_IN_GROUPS = ("attn_implementation", "gguf_file", "instruction")
SEPARATORS = re.compile(r"[^\w=.,+-]+")  # what a name shows as _


def run_path(cfg: DictConfig, overrides: list[str], choices: dict[str, str]) -> Path:
    """Returns runs_dir/TASK-MODEL/BASELINE-nG-seedS[-key=value...].

    overrides: the command line's task overrides; choices: Hydra's runtime choices per group.
    """
    folder = Path(cfg.runs_dir).expanduser() / f"{choices['task']}-{choices['model']}"
    identifying = identifying_overrides(overrides)
    path = folder / (short_name(cfg, choices) + suffix(identifying))
    former = folder / (short_name(cfg, choices) + former_suffix(identifying))
    if not cfg.overwrite and not (path / "config.yaml").exists() and (former / "config.yaml").exists():
        return former  # made before values were shortened: the same command goes on there
    return path


def short_name(cfg: DictConfig, choices: dict[str, str]) -> str:
    """Returns BASELINE-nG-seedS, which the name of every run begins with."""
    return f"{choices['baseline']}-n{cfg.group_size}-seed{cfg.seed}"


def identifying_overrides(overrides: list[str]) -> list[str]:
    """Returns the overrides that the end of the name is made of, sorted: those of keys that make another run."""
    pairs = (override.lstrip("+") for override in overrides)
    keys = {pair: pair.split("=", 1)[0] for pair in pairs}
    return sorted(pair for pair, key in keys.items() if key not in NAMED and not is_one_of(key, WHERE_AND_HOW))


def suffix(overrides: list[str]) -> str:
    """Returns "-key=value" for each override, as typed where all of it is short and plain.

    Otherwise a folder or hub id is shown by its last part, long values are cut, pairs that do not fit are left out, and
    a digest of what was typed ends the name, so that no two sets of overrides share one.
    """
    pairs = [override.partition("=") for override in overrides]  # equals is "" where a key is deleted
    typed = "".join(f"-{shown_key(key)}{equals}{value}" for key, equals, value in pairs)
    if len(typed) <= LONGEST and all(equals and is_plain(value) for _, equals, value in pairs):
        return typed
    digest = hashlib.sha256("\n".join(overrides).encode()).hexdigest()[:8]
    name = ""
    for key, equals, value in pairs:
        pair = f"-{shown_key(key)}{equals}{shown_value(value)}"
        if len(name) + len(pair) + len(digest) < LONGEST:
            name += pair
    return f"{name}-{digest}"


def shown_key(key: str) -> str:
    """Returns a key with _ for what a name should not hold, such as the @ of task@task.evaluation."""
    return SEPARATORS.sub("_", key).lstrip("_")


def is_plain(value: str) -> bool:
    """Tells whether a name can show a value as it was typed."""
    return "=" not in value and not value.endswith("_") and SEPARATORS.search(value) is None


def shown_value(value: str) -> str:
    """Returns the last part of a path, or the value, without what a name should not hold, cut to LONGEST_VALUE."""
    last_part = value.rstrip("/'\"").rsplit("/", 1)[-1]
    return SEPARATORS.sub("_", last_part.replace("=", "_")).strip("_")[:LONGEST_VALUE]


def former_suffix(overrides: list[str]) -> str:
    """Returns the suffix that earlier versions gave the same overrides: whole paths, cut anywhere."""
    name = "".join("-" + SEPARATORS.sub("_", override).strip("_") for override in overrides)
    return name if len(name) <= LONGEST else f"{name[:100]}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"


# ---- what makes two configurations the same run


def identity(config: dict) -> dict[str, object]:
    """Returns the flat `key.sub: value` pairs that two runs of one experiment share."""
    pairs = {key: value for key, value in flatten(config).items() if not is_one_of(key, WHERE_AND_HOW)}
    for task in ("task", "task.evaluation"):
        if Path(str(pairs.get(f"{task}.path"))).expanduser().exists():
            pairs.pop(f"{task}.revision", None)  # of a hub id alone
    return {key: value for key, value in pairs.items() if not is_as_before(key, value)}


def without_later(value):
    """Returns a group of keys without those of LATER_IN_GROUPS that are null, so that digests stay what they were."""
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if item is not None or key not in LATER_IN_GROUPS}


def difference(old: dict, new: dict) -> list[str]:
    """Returns a line `key: old -> new` for every identifying key that differs."""
    before, after = identity(old), identity(new)
    absent = "(absent)"
    return [
        f"{key}: {before.get(key, absent)} -> {after.get(key, absent)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key, absent) != after.get(key, absent)
    ]
