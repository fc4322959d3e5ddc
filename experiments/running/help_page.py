"""Prints `python experiments/run.py --help`: what may be typed, and a line on each choice of each group.

The text comes from the yamls in conf/, as docs/keys.md does; a baseline without a comment is described by its module.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import yaml

from experiments.keys import TITLES, choices, header
from experiments.running.command_line import CONF

HEAD = """usage: python experiments/run.py [-m] [KEY=VALUE ...] [GROUP=CHOICE ...]

Trains one run; with -m one for each combination of the values that commas separate:
  python experiments/run.py -m baseline=otb,grpo seed=0,1,2

docs/keys.md lists every key with its default and its meaning; add `--cfg job` to see what a command composes.
The most used keys: group_size, prompts_per_step, steps, seed, learning_rate, evaluation.every, checkpoint_every,
runs_dir, gpus, overwrite, trainer.KEY (any option of trl.GRPOConfig). Groups and their choices, the default first:
"""
WIDTH = 120


def help_page() -> str:
    """Returns the whole text."""
    parts = [HEAD]
    for group, title in TITLES.items():
        files = choices(group)
        longest = max(len(file.stem) for file in files)
        parts.append(f"\n{group}: {title}\n")
        parts += [f"  {file.stem:{longest}}  {about(file, WIDTH - longest - 4)}".rstrip() + "\n" for file in files]
    return "".join(parts)


def about(file: Path, width: int) -> str:
    """Returns the first sentence about a choice, cut to a line; "" where neither yaml nor module says anything."""
    text = header(file) or docstring_of_target(file)
    sentence = re.split(r"(?<=[^.][^.rs][.;]) ", text, maxsplit=1)[0].rstrip(";")  # not after "Dr." or "vs."
    return textwrap.shorten(sentence, width, placeholder=" ...")


def docstring_of_target(file: Path) -> str:
    """Returns the first line of the docstring of the module that a yaml's `_target_` lies in; "" without one."""
    target = (yaml.safe_load(file.read_text(encoding="utf8")) or {}).get("_target_")
    module = CONF.parent / (str(target).rpartition(".")[0].replace(".", "/") + ".py")
    if not target or not module.is_file():
        return ""
    return (ast.get_docstring(ast.parse(module.read_text(encoding="utf8"))) or "").partition("\n")[0]
