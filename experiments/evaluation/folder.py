"""The folder of one policy's evaluation on one task: fixed batches, samples that survive a kill, results.

evaluations/TASK/POLICY-DIGEST/ (for a run's checkpoint, evaluations/TASK/RUN-DIGEST/step-00000040/) holds
  config.yaml, environment.json   what was evaluated, and on which machine
  problems.jsonl                  a row per problem: prompt and reference
  samples.jsonl                   a row per sample
  results.json, results.csv       measures of analysis/evaluations.py, once all samples are drawn
Imports no torch, so a finished evaluation is shown within a second.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from otb.errors import RunError, unwritable
from otb.files import sync_file, write_atomically
from otb.records import RunDirectory, read_rows, write_rows

SAMPLES_TOGETHER = 4  # samples of a problem in one batch, if k is a multiple of 4


@dataclass(frozen=True)
class Batches:
    """The batches in which samples are drawn. A batch always holds the same samples, whatever was drawn before.

    A round takes the next `samples` samples of every problem, problem by problem, in batches of equal size. Larger k
    only adds rounds, so evaluations with k = 4, 8, ... share their samples.

    problems: of the task. samples: per problem in a round. rollouts: the most in a batch. parts: the number of equal
    parts of every batch, one per process that shares a copy of the policy.
    """

    problems: int
    samples: int
    rollouts: int
    parts: int = 1

    @property
    def size(self) -> int:
        """Rollouts of every batch; a smaller last batch is filled up with a repeated sample."""
        rows = self.problems * self.samples
        return math.ceil(rows / math.ceil(rows / self.rollouts) / self.parts) * self.parts

    @property
    def in_round(self) -> int:
        """Batches of a round."""
        return math.ceil(self.problems * self.samples / self.size)

    def count(self, k: int) -> int:
        """Returns the number of batches that hold the first k samples of every problem."""
        return k // self.samples * self.in_round

    def pairs(self, batch: int) -> list[tuple[int, int]]:
        """Returns (problem, sample) of each row of a batch, numbered from 0."""
        round_, position = divmod(batch, self.in_round)
        first, last = position * self.size, min((position + 1) * self.size, self.problems * self.samples)
        return [(row // self.samples, round_ * self.samples + row % self.samples) for row in range(first, last)]

    def drawn_by(self, batch: int, part: int) -> tuple[list[tuple[int, int]], int]:
        """Returns the pairs that process `part` of a batch draws, and how many of them count.

        A batch smaller than `size` is filled up, so all processes draw the same number.
        """
        pairs, share = self.pairs(batch), self.size // self.parts
        filled = pairs + pairs[:1] * (self.size - len(pairs))
        count = min(share, max(0, len(pairs) - part * share))
        return filled[part * share : (part + 1) * share], count


def samples_together(k: int) -> int:
    """Returns how many samples of a problem one batch holds: the largest of 4, 2 and 1 that divides k."""
    return math.gcd(k, SAMPLES_TOGETHER)


def batch_seed(seed: int, task: str, batch: int) -> int:
    """Returns the seed of torch's generator for one batch, below 2 ** 63; it depends only on the arguments."""
    return int.from_bytes(hashlib.sha256(f"{seed} {task} {batch}".encode()).digest()[:8]) >> 1


class EvaluationFolder:
    """The files of one evaluation. A single process writes (`RunLock`); any may read."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.record = RunDirectory(self.path)  # appends rows, and knows environment.json
        self.config_file = self.path / "config.yaml"
        self.problems_file = self.path / "problems.jsonl"
        self.samples_file = self.path / "samples.jsonl"
        self.results_file = self.path / "results.json"
        self.table_file = self.path / "results.csv"

    def results(self) -> dict:
        """Returns results.json; {} if the evaluation is not complete."""
        try:
            return json.loads(self.results_file.read_text(encoding="utf8"))
        except FileNotFoundError:
            return {}

    def results_of(self, k: int) -> dict:
        """Returns the results of the first k samples; raises RunError if there are fewer."""
        results = self.results()
        if results.get("drawn", 0) < k:
            raise RunError(f"{self.path} has fewer than k={k} samples of every problem. Evaluate again with k={k}.")
        if results["k"] != k:
            facts = {key: value for key, value in results.items() if key not in ("k", "drawn", "measures")}
            self.write_results(k, results["drawn"], facts)
        return self.results()

    def has(self, k: int) -> bool:
        """Returns whether the first k samples of every problem have been drawn."""
        return self.results().get("drawn", 0) >= k

    def keep_problems(self, rows: list[dict]) -> None:
        """Writes the problems; raises RunError if the folder already holds samples of other problems."""
        written = list(read_rows(self.problems_file))
        problems = [{"problem": number, **row} for number, row in enumerate(rows)]
        if written and written != json.loads(json.dumps(problems)):
            raise RunError(
                f"{self.path} holds samples of other problems: its {len(written)} rows differ from the task's "
                f"{len(rows)}. A folder holds one evaluation. Move it aside, or use another evaluations_dir."
            )
        if not written:
            write_rows(self.problems_file, problems)

    def resume(self, batches: Batches) -> int:
        """Cuts off a batch that a kill left incomplete; returns the number of complete batches.

        Raises RunError if samples.jsonl does not hold the rows of these batches in order.
        """
        complete, end, position = 0, 0, 0
        pending = batches.pairs(0)
        if not self.samples_file.exists():
            return 0
        with open(self.samples_file, "rb") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    if line.endswith(b"\n"):
                        raise self._damaged(line) from None
                    break
                if not line.endswith(b"\n"):
                    break
                if (row.get("problem"), row.get("sample")) != pending[0]:
                    raise self._damaged(line)
                position += len(line)
                pending = pending[1:]
                if not pending:
                    complete, end = complete + 1, position
                    pending = batches.pairs(complete)
        os.truncate(self.samples_file, end)
        return complete

    def _damaged(self, line: bytes) -> RunError:
        return RunError(
            f"{self.samples_file} holds a line that is not the next sample of this evaluation: {line[:80]!r}. Restore "
            "the file, or move the folder aside to start over."
        )

    def append(self, rows: list[dict]) -> None:
        """Appends samples, each of them completely or not at all, and waits until they are on the disk."""
        for row in rows:
            self.record.append(self.samples_file, row)
        sync_file(self.samples_file)

    def write_results(self, k: int, drawn: int, facts: dict) -> None:
        """Writes the measures of the first k samples. drawn: samples of every problem so far."""
        from analysis.evaluations import measures, read_samples  # importing scipy takes a second

        table = measures(read_samples(self.path, k), k)
        write_atomically(self.table_file, table.to_csv(index=False))
        rows = table.astype(object).where(table.notna(), None).to_dict("records")  # JSON has no NaN
        results = facts | {"k": k, "drawn": drawn, "measures": rows}
        write_atomically(self.results_file, json.dumps(results, indent=1, allow_nan=False) + "\n")


def hold(checkpoint: Path, held: Path, left_out: tuple[str, ...]) -> Path | None:
    """Copies a checkpoint to `held`, which no run prunes, and returns it; None if the checkpoint no longer exists.

    Hard links cost no space; on another file system the files are copied. left_out: patterns of unneeded files.
    """
    if held.exists():
        return held
    writing = held.with_name(f".{held.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        shutil.copytree(checkpoint, writing, ignore=shutil.ignore_patterns(*left_out), copy_function=link_or_copy)
        os.rename(writing, held)
    except (FileNotFoundError, shutil.Error) as error:
        shutil.rmtree(writing, ignore_errors=True)
        if checkpoint.exists():
            raise unwritable(held, error) from error
        return None
    except OSError as error:
        raise unwritable(held, error) from error
    return held


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
