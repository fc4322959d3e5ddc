"""Tests what every task must do, for all tasks of conf/task whose rows are here, including tasks added later."""

import inspect
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from statistics import mean

import pytest
import yaml
from datasets import Dataset
from hydra.core.global_hydra import GlobalHydra

from experiments.running.build import build
from experiments.running.data import load_rows
from otb.errors import RunError
from otb.tasks.arithmetic import Arithmetic, running_totals
from otb.tasks.arithmetic_long import ArithmeticLong
from otb.tasks.arithmetic_long_tools import ArithmeticLongTools
from otb.tasks.arithmetic_tools import ArithmeticTools
from otb.tasks.maths import Maths
from tests.support.commands import ROOT
from tests.support.recipes import composed

# How a right response may end; a task that reads answers in another form adds it.
FORMS = ("\\boxed{%s}", "%s")
JUNK = ([], [{"role": "assistant", "content": ""}], [{"role": "assistant", "content": "\\boxed{"}])
FEW = 8  # rows whose answers are graded


def configured(name: str):
    """Returns the task of conf/task/NAME.yaml, configured for model=tiny."""
    return build(composed(f"+task={name}", command=None), "task")


def tasks_with_rows_here() -> list[str]:
    """Returns the names in conf/task, except tasks that read the hub or a missing local file."""
    GlobalHydra.instance().clear()
    here = []
    for name in sorted(path.stem for path in (ROOT / "conf" / "task").glob("*.yaml")):
        with suppress(ValueError):  # a path that does not exist
            if all(source.local is not None for source in getattr(configured(name), "sources", list)()):
                here.append(name)
    return here


HERE = tasks_with_rows_here()


@pytest.fixture(scope="module", params=HERE)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def task(name):
    return configured(name)


def asked(messages: Iterable[dict]) -> str:
    """Returns the user's last message."""
    return [message["content"] for message in messages if message["role"] == "user"][-1]


def says(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def rewards(task, responses: list, answers: list[str]) -> list:
    return task.reward(responses, answer=answers, log_metric=lambda name, value: None)


def test_task_has_the_same_rows_each_time_it_is_built_and_they_end_with_the_user(name, task):
    again = configured(name)
    for rows, same in ((task.train_dataset(), again.train_dataset()), (task.eval_dataset(), again.eval_dataset())):
        assert len(rows) and list(rows) == list(same)
        assert {row["prompt"][-1]["role"] for row in rows} == {"user"}
        assert {type(row["answer"]) for row in rows} == {str}


def test_task_has_no_prompt_in_both_sets_nor_in_its_demonstrations(task):
    train, held_out = ({asked(row["prompt"]) for row in rows} for rows in (task.train_dataset(), task.eval_dataset()))
    assert sorted(train & held_out) == []
    if hasattr(task, "demonstrations"):
        shown = {asked(chat) for chat in task.demonstrations(0, 2000)}
        assert sorted(shown & (train | held_out)) == []


def test_more_demonstrations_only_add_to_those_of_the_same_seed_and_noise(task):
    if not hasattr(task, "demonstrations"):
        pytest.skip("the task has no demonstrations")
    few, more = task.demonstrations(0, 5, 0.5), task.demonstrations(0, 20, 0.5)
    assert len(few) == 5 and more[:5] == few
    assert task.demonstrations(1, 5, 0.5) != few


def test_the_reference_answer_is_rewarded_with_one_and_another_answer_and_junk_with_less(task):
    answers = [row["answer"] for row in list(task.eval_dataset())[:FEW]]
    by_form = [rewards(task, [says(form % answer) for answer in answers], answers) for form in FORMS]
    assert [max(given) for given in zip(*by_form, strict=True)] == [1.0] * len(answers), by_form
    wrong = [says(form % f"{answer}1") for form in FORMS for answer in answers]
    junk = [list(messages) for messages in JUNK]
    given = rewards(task, [*wrong, *junk], [*answers * len(FORMS), *answers[:1] * len(junk)])
    assert all(reward is None or 0 <= reward < 1 for reward in given), given


@pytest.mark.parametrize("kind", [Arithmetic, ArithmeticTools])
@pytest.mark.parametrize(("noise", "low", "high"), [(0.0, 1.0, 1.0), (1.0, 0.5, 0.75)])
def test_careful_demonstrations_are_right_and_noisy_ones_in_half_to_three_quarters(kind, noise, low, high):
    chats = kind().demonstrations(seed=0, n=1000, noise=noise)
    said = [[message for message in chat if message["role"] not in ("system", "user")] for chat in chats]
    assert low <= mean(kind().reward(said, [str(running_totals(asked(chat))[-1]) for chat in chats])) <= high


@pytest.mark.parametrize("kind", [Arithmetic, ArithmeticTools, ArithmeticLong, ArithmeticLongTools])
def test_yaml_holds_the_defaults_of_the_signature(kind):
    module = kind.__module__
    values = yaml.safe_load((ROOT / "conf" / "task" / f"{module.rpartition('.')[2]}.yaml").read_text())
    assert values.pop("_target_") == f"{module}.{kind.__name__}"
    assert values.pop("instruction").startswith("${unless_tiny:")
    values["instruction"] = None  # that of model=tiny
    assert values == {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}


def test_tasks_that_need_no_data_set_are_among_those_tested():
    assert {"arithmetic", "arithmetic_tools"} <= set(HERE)


# ---- refusals and notes of a run


@dataclass(frozen=True)
class Overlapping(Arithmetic):
    """A task that trains on all its evaluation problems, and on others."""

    def train_dataset(self):
        rows = [*super().train_dataset().select(range(3)), *self.eval_dataset()]
        return Dataset.from_list(rows)


def test_a_task_made_in_code_that_trains_on_a_held_out_prompt_is_refused_with_the_first_of_them():
    with pytest.raises(RunError) as refused:
        load_rows(composed("prompts_per_step=2"), Overlapping(eval_prompts=5))
    first = json.dumps(asked(Overlapping(eval_prompts=5).eval_dataset()[0]["prompt"]))
    said = f"5 of the 5 held-out prompts of arithmetic are training prompts too; the first is {first}."
    assert str(refused.value).startswith(f"{said} No prompt may be in both: change train_dataset or eval_dataset")


def test_a_data_set_with_a_held_out_prompt_among_its_training_prompts_is_loaded_with_a_note(tmp_path):
    """Such rows are not ours to change: a note says how many there are, and the run continues."""
    both, questions = {"question": "What is 1 + 1?", "answer": "2"}, ("What is 2 + 2?", "What is 3 + 3?")
    train = [*({"question": question, "answer": "4"} for question in questions), both]
    for split, rows in (("train", train), ("test", [{"question": "What is 1 + 2?", "answer": "3"}, both])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    maths = {"question_column": "question", "answer_column": "answer", "train_split": "train", "eval_split": "test"}
    task = Maths(name="ours", path=str(tmp_path), max_completion_length=8, instruction=None, **maths)
    rows = load_rows(composed("prompts_per_step=2"), task)
    assert len(rows.train) == 3
    said = '1 of the 2 held-out prompts of ours are training prompts too; the first is "What is 1 + 1?".'
    assert rows.notes == [said]
