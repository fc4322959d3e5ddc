"""Trains a policy on a task's own solutions until it solves the task now and then, so that RL can improve it.

python experiments/warm_start.py model.name=FOLDER task=arithmetic output=models/warm
python experiments/warm_start.py model.name=OWNER/NAME task=gsm8k task.solution_column=answer output=models/warm
RL cannot learn from a policy that is never rewarded. The output is an ordinary folder for model.name=, with its record
in made_from.json; the same command again finds it and does nothing. docs/real_model.md shows an example.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments import checks
from experiments.checks.files import check_sources, check_training_rows
from experiments.checks.model import check_model_is_here
from experiments.checks.values import check_numbers, check_positive, check_true_or_false, told_to_the_user, whole_number
from experiments.running.build import is_tiny
from experiments.running.command_line import CONF, exit_codes, refusals, run_hydra
from experiments.running.devices import visible_gpus
from experiments.running.threads import check_threads
from otb.errors import RunError, unwritable
from otb.policies.folders import MADE_FROM
from otb.records.config_keys import flatten
from otb.tasks import Task
from otb.training.options import Batches, batches
from otb.values import Rule

WHERE_AND_HOW = ("output", "use_cpu", "threads", "model.learning_rate")  # keys that do not change the policy
NUMBERS = {
    **dict.fromkeys(("demonstrations", "demonstrations_per_step"), whole_number(1)),
    "seed": whole_number(0),
    "steps": whole_number(1, 80, "null for one pass"),
    "noise": Rule("a number from 0 to 1", lambda value: 0 <= value <= 1, 1),
}


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="warm_start")
def main(cfg: DictConfig) -> None:
    with refusals():
        task, step = check(cfg)
        output, asked = Path(str(cfg.output)).expanduser(), recipe(cfg)
        if is_there(output, asked):
            print(f"{output}: already made with the same settings; nothing to do.")
            return
        check_files(cfg, task)
        from experiments.running.make_policy import make_policy  # takes seconds: torch, transformers, trl

        command = ["python", "experiments/warm_start.py", *HydraConfig.get().overrides.task]
        record = make_policy(cfg, task, output, step, {"recipe": asked, "command": command})
        first, last = record["losses"][0], record["losses"][-1]
        print(f"{output}: {len(record['losses'])} steps, loss {first:.2f} -> {last:.2f}. Use it as model.name={output}")


def check(cfg: DictConfig) -> tuple[Task, Batches]:
    """Returns the task and how a step is divided; loads nothing. Raises RunError if it is invalid."""
    check_numbers(cfg, NUMBERS)
    check_positive(cfg, "learning_rate", "1e-4")
    check_true_or_false(cfg, "use_cpu")
    check_threads(cfg)
    if OmegaConf.is_missing(cfg, "output"):
        raise RunError("output, the folder for the policy, is not set. Add output=FOLDER.")
    task = checks.check_model_and_task(cfg)
    if is_tiny(cfg.model):
        raise RunError(
            f"model.name={cfg.model.name} with model=tiny needs no warm start: every command that uses it makes one, "
            "with the values of model.warm_start. Leave model=tiny out and give model.name=OWNER/NAME, or a folder."
        )
    check_task(task)
    gpus = [] if cfg.use_cpu else visible_gpus()
    if len(gpus) > 1:
        raise RunError(f"{len(gpus)} GPUs are visible, but this command uses one. Add CUDA_VISIBLE_DEVICES={gpus[0]}.")
    check_writable(Path(str(cfg.output)).expanduser())
    with told_to_the_user():
        whole = cfg.demonstrations_per_step
        return task, batches(whole, 1, 1, cfg.model.rollouts_per_forward, of="demonstrations of a step")


def check_task(task: Task) -> None:
    """Raises RunError if the task has no solutions to learn from."""
    if task.environment is not None and not hasattr(task, "demonstrations"):
        raise RunError(
            f"task {task.name} has a tool, but its column of solutions shows no call: it would teach the policy never "
            "to call the tool. Warm-start on a task with its own demonstrations (arithmetic_tools), or without tools."
        )
    if not hasattr(task, "demonstrations") and getattr(task, "solution_column", None) is None:
        raise RunError(
            f"task {task.name} has no solutions to learn from: neither its own demonstrations nor a solution_column. "
            "Try task=arithmetic, or task.solution_column=NAME (gsm8k: answer)."
        )
    check_training_rows(task)


def check_files(cfg: DictConfig, task: Task) -> None:
    """Raises RunError if rows or model do not exist; reads neither."""
    check_sources([task.training_source()] if hasattr(task, "training_source") else [])
    check_model_is_here(cfg)


def check_writable(output: Path) -> None:
    """Raises RunError if the folder cannot be made."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(output.parent, os.W_OK | os.X_OK):
            raise PermissionError(13, "no permission", str(output.parent))
    except OSError as error:
        raise unwritable(output, error) from error


def recipe(cfg: DictConfig) -> dict:
    """Returns the flat keys that the policy depends on."""
    pairs = flatten(OmegaConf.to_container(cfg, resolve=True))
    return {key: value for key, value in pairs.items() if key not in WHERE_AND_HOW}


def is_there(output: Path, asked: dict) -> bool:
    """Returns whether `output` was made with the recipe `asked`. Raises RunError if it holds anything else."""
    if not output.exists():
        return False
    try:
        made = json.loads((output / MADE_FROM).read_text(encoding="utf8"))["recipe"]
    except (OSError, ValueError, KeyError):
        raise RunError(f"output={output} exists already and is not overwritten. Use another folder.") from None
    keys = sorted(key for key in {*made, *asked} if made.get(key) != asked.get(key))
    if keys:
        changed = "\n  ".join(f"{key}: {made.get(key, '(absent)')} -> {asked.get(key, '(absent)')}" for key in keys)
        raise RunError(
            f"output={output} holds a policy that was made with other settings (there -> here):\n  {changed}\n"
            "Use another folder."
        )
    return True


def command_line(arguments: list[str]) -> None:
    """Runs `python experiments/warm_start.py ARGUMENTS`; the process ends with an exit code of otb/errors.py."""
    with exit_codes(after_stop="starts over, because nothing was written"):
        run_hydra(main, __file__, arguments, "warm_start")


if __name__ == "__main__":
    command_line(sys.argv[1:])
