"""Checks that the keys below a group are those of its chosen file in conf, as others would be ignored. No torch."""

from __future__ import annotations

from functools import cache

from omegaconf import DictConfig, OmegaConf

from experiments.checks.values import check_known
from experiments.running.command_line import CONF
from experiments.running.grpo_options import typed
from otb.errors import RunError


def check_keys_of_choice(cfg: DictConfig, group: str) -> None:
    """Raises RunError for a key below `group` that its choice, `cfg[group].name`, has not; names those that have it."""
    choices, chosen = keys_of_choices(group), str(cfg[group].name)
    known = choices.get(chosen, tuple(cfg[group]))
    for key, value in cfg[group].items():
        having = [choice for choice, keys in choices.items() if key in keys]
        if key not in known and having:
            raise RunError(
                f"{group}.{key}={typed(value)} is a key of {group}={' and '.join(having)}, and {group}={chosen} would "
                f"ignore it. Add {group}={having[0]}, or leave it out."
            )
    keys = [[key for key in of if key != "name"] for of in (cfg[group], known)]
    check_known(group, *keys, f"key of {group}={chosen}")


@cache
def keys_of_choices(group: str) -> dict[str, tuple[str, ...]]:
    """Returns choice -> keys of every file of a group of conf."""
    files = {path.stem: OmegaConf.load(path) for path in sorted((CONF / group).glob("*.yaml"))}
    return {choice: tuple(str(key) for key in file if key != "defaults") for choice, file in files.items()}
