"""Maths problems with a checkable final answer: GSM8K, MATH, AIME, AMC, DAPO-Math and similar data sets.

One class serves them all. conf/task/*.yaml holds its arguments, which say which columns hold question and answer.
Hydra builds it for experiments/; otb.tasks.grading grades its responses.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from otb.tasks.columns import cell_at, distinct_rows, prompt_messages, reference, require_column, worked_solution
from otb.tasks.grading import Grade, Outcome, grade_batch
from otb.tasks.loading import load_rows, provenance
from otb.tasks.python_tool import MIN_TURNS, PythonTool
from otb.tasks.sources import Source

if TYPE_CHECKING:
    from collections.abc import Callable

    from datasets import Dataset

BOXED = r"Please reason step by step, and put your final answer within \boxed{}."


class _Part(NamedTuple):
    """Rows of a split, and the number of repeated rows that were dropped."""

    rows: Dataset
    dropped: int


@dataclass(frozen=True)
class Maths:
    r"""A task over the rows of a data set, which are read on first use.

    Args:
        name: The task's name in errors and records.
        path: A file (.jsonl, .json, .parquet, .csv), a folder of such files or of `save_to_disk`, or a hub id.
        question_column, answer_column: Names, or dotted paths into nested columns (`reward_model.ground_truth`). A
            question is a string or a list of chat messages.
        max_completion_length: The most tokens of a response.
        train_split, eval_split: A split's name; `only` = the data set's single split; None = no such rows.
        evaluation: Another task, whose evaluation rows are used instead (train on DAPO, evaluate on AIME24).
        config, revision: Config and revision of the hub's data set.
        files: A pattern below the folder or hub id, such as `train/*`, for sets whose file names do not show their
            splits; the matching files form one split, `only`.
        unique: Keep only the first of rows with equal prompt and answer.
        answer_after: The reference is the text after the last such mark in the answer column (GSM8K: `####`).
        answer_marker: A response may also state its answer on a line that starts with this text (DAPO: `Answer:`).
        system_prompt: A first message for rows that have none.
        instruction: Text appended to the user's message unless the message already contains it.
        max_eval_rows: Use only this many evaluation rows, from the first; None = all.
        drop_unanswered: Drop rows without a question or an answer; by default they are an error.
        solution_column: Column of worked solutions, for a supervised warm start; None = there are none.
        max_turns: Assistant turns with Python as a tool; the last one can only answer. None = no tool. Own and tool
            tokens then share `max_completion_length`, and the answer is read from the policy's last message.

    Raises:
        ValueError: The arguments or the data do not make a task; the text says the value, the rule and the fix.
    """

    name: str
    path: str | None
    question_column: str
    answer_column: str
    max_completion_length: int
    train_split: str | None = None
    eval_split: str | None = None
    evaluation: Maths | None = None
    config: str | None = None
    revision: str | None = None
    files: str | None = None
    unique: bool = False
    answer_after: str | None = None
    answer_marker: str | None = None
    system_prompt: str | None = None
    instruction: str | None = BOXED
    max_eval_rows: int | None = None
    drop_unanswered: bool = False
    max_turns: int | None = None
    solution_column: str | None = None

    def __post_init__(self) -> None:
        if self.path is None:
            raise ValueError(f"task {self.name} has path=null: we know no hub id for it. Try task.path=FOLDER.")
        for key, least, usual in (
            ("max_completion_length", 1, 32),
            ("max_eval_rows", 1, 32),
            ("max_turns", MIN_TURNS, 5),
        ):
            count = getattr(self, key)
            if count is not None and count < least:
                raise ValueError(f"{key}={count} of task {self.name} must be at least {least}. Try {key}={usual}.")
        if self.eval_split is not None and self.evaluation is not None:
            raise ValueError(
                f"task {self.name} has eval_split={self.eval_split!r} and evaluation={self.evaluation.name!r}; "
                f"evaluation rows can only come from one of them. Try task.eval_split=null."
            )
        if self.files is not None and None not in (self.train_split, self.eval_split):
            raise ValueError(
                f"task {self.name} has files={self.files!r}, which form one split, but train_split and eval_split are "
                "both set: it would be evaluated on its training rows. Try task.eval_split=null "
                "+task@task.evaluation=math500."
            )
        if self.train_split is not None and self.train_split == self.eval_split:
            raise ValueError(
                f"task {self.name} has train_split=eval_split={self.eval_split!r}: it would be evaluated on its "
                f"training rows. Try task.train_split=null to evaluate only, or another split."
            )

    @property
    def environment(self) -> type[PythonTool] | None:
        """The class that makes the environment of one rollout; None without tools."""
        return None if self.max_turns is None else PythonTool

    def train_dataset(self) -> Dataset:
        """Returns columns `prompt` (chat messages) and `answer` (str). Raises ValueError without training rows."""
        return self._train.rows

    def eval_dataset(self) -> Dataset:
        """Returns at most `max_eval_rows` rows, like `train_dataset`; they come from `evaluation` if it is set."""
        rows = self._eval.rows if self.evaluation is None else self.evaluation.eval_dataset()
        return rows if self.max_eval_rows is None else rows.select(range(min(self.max_eval_rows, len(rows))))

    @cached_property
    def _train(self) -> _Part:
        return self._read(self.training_source())

    @cached_property
    def _eval(self) -> _Part:
        if self.eval_split is None:
            raise ValueError(
                f"task {self.name} has neither eval_split nor evaluation, so there is nothing to evaluate on. Try "
                f"task.eval_split=test or +task@task.evaluation=math500."
            )
        source = self._source(self.eval_split)
        if self.train_split is not None and source.local is not None and source.local.is_file():
            raise ValueError(
                f"path={self.path!r} is one file, so task {self.name} would be evaluated on its training rows. Try "
                f"task.eval_split=null +task@task.evaluation=math500, or task.train_split=null to evaluate only."
            )
        return self._read(source)

    def _source(self, split: str) -> Source:
        return Source(str(self.path), split, self.config, self.revision, self.files)

    def _read(self, source: Source) -> _Part:
        columns = (self.question_column, self.answer_column)
        read = load_rows(source, columns)
        for column in columns:
            require_column(read, column, self.name, self.path)
        if not self.unique:
            return _Part(self._chat_rows(read), 0)
        # The first pass compares raw columns, which is quick; the second finds chat rows that became equal.
        made = self._chat_rows(distinct_rows(read, columns))
        rows = distinct_rows(made, ("prompt", "answer"))
        return _Part(rows, len(read) - len(rows))

    def _chat_rows(self, rows: Dataset) -> Dataset:
        from datasets import Features, List, Value

        # Plain locals, because `datasets` names its cache after a hash of everything that the function refers to.
        question, answer, answer_after = self.question_column, self.answer_column, self.answer_after
        system_prompt, instruction = self.system_prompt, self.instruction

        def chat(row: Mapping) -> dict:
            return {
                "prompt": prompt_messages(cell_at(row, question), system_prompt, instruction),
                "answer": reference(cell_at(row, answer), answer_after),
            }

        message = {"role": Value("string"), "content": Value("string")}
        # Without explicit features, an `answer` column of floats would turn '27' back into 27.0.
        features = Features({"prompt": List(message), "answer": Value("string")})
        made = rows.map(chat, remove_columns=rows.column_names, features=features)
        complete = [bool(row["prompt"] and row["answer"]) for row in made]
        kept = [i for i, whole in enumerate(complete) if whole]
        if len(kept) < len(made) and not self.drop_unanswered:
            first = complete.index(False)
            raise ValueError(
                f"{len(made) - len(kept)} of {len(made)} rows of task {self.name} (path={self.path!r}) lack a question "
                f"or an answer, starting with row {first}; each row needs both. Try task.drop_unanswered=true."
            )
        if not kept:
            raise ValueError(
                f"None of the {len(made)} rows of task {self.name} (path={self.path!r}) has a question and an answer. "
                f"Check task.answer_column={self.answer_column} and task.answer_after={self.answer_after}."
            )
        return made if len(kept) == len(made) else made.select(kept)

    def solutions(self, seed: int, n: int) -> list[list[dict]]:
        """Returns `n` solved training problems as chat messages, prompt and solution; a larger `n` appends more.

        They are drawn without replacement in an order that depends on the seed. Raises ValueError if the task has no
        solution_column or fewer than `n` solutions.
        """
        if self.solution_column is None:
            raise ValueError(f"task {self.name} has no solution_column. Try task.solution_column=answer, or solution.")
        if self.train_split is None:
            raise ValueError(f"task {self.name} has train_split=null, so it has no solved problems to train on.")
        rows = load_rows(self._source(self.train_split))
        require_column(rows, self.solution_column, self.name, self.path)
        solved = (self._solved(rows[i]) for i in random.Random(f"solutions {seed}").sample(range(len(rows)), len(rows)))
        chats = list(itertools.islice(filter(None, solved), n))
        if len(chats) < n:
            raise ValueError(f"task {self.name} has {len(chats)} solved problems, fewer than {n}. Ask for fewer.")
        return chats

    def _solved(self, row: Mapping) -> list[dict]:
        """Returns the prompt and the solution of a row; [] if it lacks a question, an answer or a solution."""
        prompt = prompt_messages(cell_at(row, self.question_column), self.system_prompt, self.instruction)
        answer = reference(cell_at(row, self.answer_column), self.answer_after)
        solution = worked_solution(cell_at(row, str(self.solution_column)), answer, self.answer_after)
        complete = prompt and answer and solution
        return [*prompt, {"role": "assistant", "content": solution}] if complete else []

    def grades(self, completions: list, answer: list[str]) -> list[Grade]:
        """Grades the last assistant message of each rollout against the reference."""
        return grade_batch([last_assistant_text(messages) for messages in completions], answer, self.answer_marker)

    def reward(self, completions: list, answer: list[str], log_metric: Callable | None = None, **columns: Any) -> list:
        """Returns a reward per rollout: 1.0 correct, 0.0 wrong or unparsable, None if the grader failed (unscored).

        `log_metric(name, value)`, which TRL passes, receives the share of each outcome as `grades/<outcome>`.
        """
        grades = self.grades(completions, answer)
        if log_metric is not None and grades:
            counts = Counter(grade.outcome for grade in grades)
            for outcome in Outcome:
                log_metric(f"grades/{outcome}", counts[outcome] / len(grades))
        return [grade.reward for grade in grades]

    def training_source(self) -> Source:
        """Returns the source of the training rows without reading them. Raises ValueError if there are none."""
        if self.train_split is None:
            raise ValueError(
                f"task {self.name} has train_split=null: its rows are for evaluation. Try task=gsm8k, or a training "
                f"task with +task@task.evaluation={self.name}."
            )
        return self._source(self.train_split)

    def evaluation_sources(self) -> list[Source]:
        """Returns the sources of the evaluation rows (those of `evaluation` if it is set) without reading them."""
        if self.evaluation is not None:
            return self.evaluation.evaluation_sources()
        return [] if self.eval_split is None else [self._source(self.eval_split)]

    def sources(self) -> list[Source]:
        """Returns the sources of all rows without reading them."""
        return [*([] if self.train_split is None else [self.training_source()]), *self.evaluation_sources()]

    def provenance(self) -> dict:
        """Returns source, file hashes and a hash of the rows, for "train" and "eval"; environment.json keeps it.

        `prompts_and_answers_sha256` is the same for a local copy and for the hub's rows, whatever the file format.
        """
        parts = {}
        if self.train_split is not None:
            parts["train"] = self._part(self.train_split, self._train)
        if self.evaluation is not None:
            parts["eval"] = self.evaluation.provenance()["eval"]
        elif self.eval_split is not None:
            parts["eval"] = self._part(self.eval_split, self._eval)
        return parts

    def _part(self, split: str, part: _Part) -> dict:
        digest = hashlib.sha256()
        for row in part.rows:
            digest.update(json.dumps([row["prompt"], row["answer"]]).encode() + b"\n")
        facts = provenance(self._source(split), part.rows) | {"prompts_and_answers_sha256": digest.hexdigest()}
        return facts | ({"repeated_rows_dropped": part.dropped} if self.unique else {})


def last_assistant_text(messages: list[dict]) -> str:
    """Returns the text of the last assistant message; '' if there is none or it holds only tool calls."""
    assistant = [message for message in messages if message["role"] == "assistant"]
    return (assistant[-1].get("content") or "") if assistant else ""
