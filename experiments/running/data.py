"""The rows of a run: read, checked and accounted for, by the first of its processes where there are several.

Called by experiments/running/train.py.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from datasets import Dataset
from omegaconf import DictConfig

from experiments.running.held_out import HeldOut, held_out_rows, own_name
from otb.errors import RunError
from otb.tasks import Task

T = TypeVar("T")


class Rows(NamedTuple):
    """Training rows, and the sets that the run is evaluated on: first the task's own, then `evaluation.tasks`.

    notes: what a user should know of them.
    """

    train: Dataset
    held_out: list[HeldOut]
    notes: list[str]


def told_by_the_first(work: Callable[[], T]) -> T:
    """Returns what `work` returns in the first process of a run; the others wait for it and do nothing.

    So what it writes, such as the caches of `datasets`, is there for the others afterwards. The process group must have
    begun where there are several. Raises what it raises, in the others as a RunError.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return work()
    from accelerate.utils import broadcast_object_list

    result, failure = None, None
    if int(os.environ["RANK"]) == 0:
        try:
            result = work()
        except Exception as error:  # whatever it is, the others wait to be told
            failure = error
    result, refusal = broadcast_object_list([result, None if failure is None else str(failure)])
    if failure is not None:
        raise failure
    if refusal is not None:
        raise RunError(refusal)
    return result


def load_rows(cfg: DictConfig, task: Task, tasks: Mapping[str, Task] | None = None) -> Rows:
    """Returns the rows of a run. Raises RunError for every problem with them, before a model is loaded.

    tasks: of `evaluation.tasks`, by name.
    """
    try:
        train, evaluation = task.train_dataset(), task.eval_dataset()
    except (ValueError, FileNotFoundError) as error:
        raise RunError(str(error)) from error
    if len(train) < cfg.prompts_per_step:
        raise RunError(
            f"prompts_per_step={cfg.prompts_per_step} is more than the {len(train)} training prompts of "
            f"{task.name}. Try prompts_per_step={len(train)}."
        )
    own = HeldOut(own_name(task), list(evaluation), task.reward)
    held_out = [own, *held_out_rows(cfg, tasks or {})]
    shared = [shared_prompts(train, one) for one in held_out]
    if shared[0] and not hasattr(task, "sources"):  # made in code, where it can be put right
        raise RunError(f"{shared[0]} No prompt may be in both: change train_dataset or eval_dataset of the task.")
    return Rows(train, held_out, [note for note in shared if note])


def shared_prompts(train: Dataset, held_out: HeldOut) -> str:
    """Returns a sentence on the held-out prompts that are training prompts too; "" where there are none."""
    prompts = {json.dumps(row["prompt"]): row["prompt"][-1]["content"] for row in held_out.rows}
    found = prompts.keys() & {json.dumps(prompt) for prompt in train["prompt"]}
    if not found:
        return ""
    first = next(text for prompt, text in prompts.items() if prompt in found)
    return (
        f"{len(found)} of the {len(prompts)} held-out prompts of {held_out.name} are training prompts too; the first "
        f"is {json.dumps(first, ensure_ascii=False)[:200]}."
    )


def provenance(task: Task, tasks: Mapping[str, Task], rows: Rows) -> dict:
    """Returns where the rows come from: `train`, `eval`, and each of `evaluation.tasks`, `tasks`, under its name."""
    own, *others = rows.held_out
    if hasattr(task, "provenance"):
        found = task.provenance()
    else:
        found = {"train": rows_facts(rows.train), "eval": rows_facts(own.rows)}
    return found | {held_out.name: evaluation_facts(tasks[held_out.name], held_out.rows) for held_out in others}


def evaluation_facts(task: Task, rows: list[dict]) -> dict:
    """Returns where the evaluation rows of a task come from: what the task says of it, or a hash of the rows."""
    source = getattr(task, "evaluation", None) or task
    if getattr(source, "train_split", source) is None:  # else its account would read the training rows, too
        return source.provenance()["eval"]
    return rows_facts(rows)


def rows_facts(rows) -> dict:
    """Returns number and digest of rows, in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return {"rows": len(rows), "rows_sha256": digest.hexdigest()}
