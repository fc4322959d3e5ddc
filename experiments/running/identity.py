"""Where a run lives, and what makes two configurations the same run. Imports no torch.

The directory of a run follows from the choices and the overrides of its command alone, so that the same command finds
it again; docs/runs.md shows the names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from otb.errors import RunError
from otb.files import sha256_of
from otb.policies.folders import ADAPTER, WEIGHT_FILES, base_of
from otb.records.config_keys import WHERE_AND_HOW, flatten, is_as_before, is_one_of

NAMED = ("baseline", "group_size", "seed", "task", "model")  # keys that the path shows in places of their own
LONGEST = 120  # characters of all overrides in a name; file systems end at 255 bytes
LONGEST_VALUE = 32  # characters of one value, once a name is shortened
NOT_OF_A_PROGRAM = ("workers", "url")  # keys of `sandbox` that change nothing that a program prints
SEPARATORS = re.compile(r"[^\w=.,+-]+")  # what a name shows as _


def run_path(cfg: DictConfig, overrides: list[str], choices: dict[str, str]) -> Path:
    """Returns runs_dir/TASK-MODEL/BASELINE-nG-seedS[-key=value...].

    overrides: the command line's task overrides; choices: Hydra's runtime choices per group.
    """
    folder = Path(cfg.runs_dir).expanduser() / f"{choices['task']}-{choices['model']}"
    return folder / (short_name(cfg, choices) + suffix(identifying_overrides(overrides)))


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


# ---- what makes two configurations the same run


def identity(config: dict) -> dict[str, object]:
    """Returns the flat `key.sub: value` pairs that two runs of one experiment share."""
    pairs = {key: value for key, value in flatten(config).items() if not is_one_of(key, WHERE_AND_HOW)}
    for task in ("task", "task.evaluation"):
        if Path(str(pairs.get(f"{task}.path"))).expanduser().exists():
            pairs.pop(f"{task}.revision", None)  # of a hub id alone
    return {key: value for key, value in pairs.items() if not is_as_before(key, value)}


def kept_keys(config: dict, group: str) -> dict:
    """Returns the keys of a group on which measurements and evaluations depend: none that has its value from before."""
    return {key: value for key, value in config[group].items() if not is_as_before(f"{group}.{key}", value)}


def difference(old: dict, new: dict) -> list[str]:
    """Returns a line `key: old -> new` for every identifying key that differs."""
    before, after = identity(old), identity(new)
    absent = "(absent)"
    return [
        f"{key}: {before.get(key, absent)} -> {after.get(key, absent)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key, absent) != after.get(key, absent)
    ]


# ---- what measurements and evaluations of one policy share, beside its name


def of_sandbox(config: dict) -> dict:
    """Returns the keys of `sandbox` on which what a program prints depends."""
    return {key: value for key, value in config["sandbox"].items() if key not in NOT_OF_A_PROGRAM}


def weights_digest(model: DictConfig, checkpoint: str | None) -> str | None:
    """Returns a digest of the weights that lie in files here: the same path may hold others tomorrow.

    model: the group of this name. None where no file here does: a hub id, and the recipe of the tiny policy, say by
    themselves what they are. Raises RunError for a folder without weights.
    """
    found = weights(model, checkpoint)
    digests = [sha256_of(place) if place.is_file() else folder_digest(place, key) for key, place in found]
    if len(digests) > 1:  # an adapter's and its base's
        return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()
    return digests[0] if digests else None


def weights(model: DictConfig, checkpoint: str | None) -> Iterator[tuple[str, Path]]:
    """Yields the folders, or the GGUF file, that a policy's weights are read from, each with the key that names it."""
    if checkpoint is not None:
        folder = Path(str(checkpoint)).expanduser()
        yield "checkpoint", folder
        if not (folder / ADAPTER).is_file():
            return
    folder = Path(str(model.name)).expanduser()
    if str(model.name) == "tiny" or not folder.is_dir():
        return
    gguf = folder / str(model.get("gguf_file"))
    yield "model.name", gguf if gguf.is_file() else folder
    base = base_of(folder)
    if base is not None and (of_base := Path(base.name).expanduser()).is_dir():
        yield "base_model_name_or_path", of_base


def folder_digest(folder: Path, key: str) -> str:
    """Returns a digest of the weights in a folder. Raises RunError where it holds none; key: what named it."""
    files = next((files for pattern in WEIGHT_FILES if (files := sorted(folder.glob(pattern)))), None)
    if files is None:
        raise RunError(
            f"{key}={folder} holds no {' and no '.join(WEIGHT_FILES)}. Give a folder with weights, such as "
            "RUN/checkpoints/step-XXXXXXXX."
        )
    return hashlib.sha256(b"".join(bytes.fromhex(sha256_of(file)) for file in files)).hexdigest()
