"""The run directory's files and the names of what is measured."""

import json
import os
import resource

import pytest

from otb.errors import RunError
from otb.files import write_atomically
from otb.records import RunDirectory, read_rows
from otb.records.metric_names import EVALUATION_METRICS, METRICS, metric_table
from tests.support.commands import ROOT


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.rollouts.mkdir()
    directory.evaluations.mkdir()
    directory.checkpoints.mkdir()
    return directory


def written(directory, step, files=("model.safetensors", "optimizer.pt")):
    """A folder as the trainer leaves it before it becomes a checkpoint."""
    folder = directory.checkpoints / ".writing"
    folder.mkdir()
    for name in files:
        (folder / name).write_text(f"{name} of step {step}")
    return folder


def test_documented_table_of_metrics_is_the_one_in_the_code():
    documented = (ROOT / "docs" / "metrics.md").read_text()
    assert documented == metric_table() + "\n", "run: python -m otb.records.metric_names > docs/metrics.md"


def test_metrics_are_defined_with_a_unit_and_a_sentence():
    for name, metric in [*METRICS.items(), *EVALUATION_METRICS.items()]:
        assert name.replace("_", "").isalnum() and name.islower()
        assert metric.unit and len(metric.definition) > 5 and "|" not in metric.definition


def test_rows_come_back_and_a_line_that_a_crash_cut_short_does_not(directory):
    directory.append(directory.metrics_file, {"step": 1, "loss": 0.5})
    directory.append(directory.metrics_file, {"step": 2, "loss": 0.25})
    with open(directory.metrics_file, "a") as file:
        file.write('{"step": 3, "lo')
    assert list(read_rows(directory.metrics_file)) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    assert directory.last_metrics() == {"step": 2, "loss": 0.25}


def test_damaged_line_in_the_middle_is_an_error_that_names_it(directory):
    directory.metrics_file.write_text('{"step": 1}\ngarbage\n{"step": 3}\n')
    with pytest.raises(RunError, match="damaged line: 'garbage.*start over with overwrite=true"):
        list(read_rows(directory.metrics_file))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_json_does_not_have_is_refused(directory, value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        directory.append(directory.metrics_file, {"step": 1, "loss": value})
    assert not directory.metrics_file.exists()


def test_row_that_does_not_fit_the_disk_leaves_no_part_of_itself(directory):
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, 30))  # two rows of 12 bytes fit
        try:
            for step in range(1, 5):
                directory.append(directory.metrics_file, {"step": step})
        except RunError as error:
            os._exit(0 if "metrics.jsonl cannot be written" in str(error) and step == 3 else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert directory.metrics_file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_rows_past_the_checkpoint_are_moved_to_discarded(directory):
    for step in (1, 2, 3, 4):
        directory.append(directory.metrics_file, {"step": step})
    for step in (0, 2, 4):
        directory.append(directory.evaluations_file, {"step": step, "accuracy": 0.5})
        (directory.rollouts / f"step-{step:08d}.parquet").touch()
        (directory.evaluations / f"step-{step:08d}.parquet").touch()
    (directory.rollouts / "failed-00000003-rank1.parquet").touch()
    assert directory.discard_after(2) == 3
    assert [row["step"] for row in read_rows(directory.metrics_file)] == [1, 2]
    assert [row["step"] for row in read_rows(directory.evaluations_file)] == [0, 2]
    assert list(read_rows(directory.discarded_file)) == [
        {"file": "metrics.jsonl", "step": 3},
        {"file": "metrics.jsonl", "step": 4},
        {"file": "evaluations.jsonl", "step": 4, "accuracy": 0.5},
    ]
    assert sorted(path.name for path in directory.rollouts.iterdir()) == [
        "failed-00000003-rank1.parquet",  # evidence of what stopped a run stays
        "step-00000000.parquet",
        "step-00000002.parquet",
    ]
    kept = [directory.evaluation_samples(step).name for step in (0, 2)]
    assert sorted(path.name for path in directory.evaluations.iterdir()) == kept


def test_discarding_twice_after_a_kill_in_between_doubles_nothing(directory):
    for step in (1, 2, 3):
        directory.append(directory.metrics_file, {"step": step})
    before = directory.metrics_file.read_text()
    directory.discard_after(1)
    directory.metrics_file.write_text(before)  # as if killed before the rows were taken out
    directory.discard_after(1)
    assert [row["step"] for row in read_rows(directory.discarded_file)] == [2, 3]
    assert [row["step"] for row in read_rows(directory.metrics_file)] == [1]


def test_appending_after_a_cut_line_and_a_resume_joins_no_lines(directory):
    directory.append(directory.metrics_file, {"step": 1})
    with open(directory.metrics_file, "a") as file:
        file.write('{"st')
    directory.discard_after(1)
    directory.append(directory.metrics_file, {"step": 2})
    assert directory.metrics_file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_checkpoint_is_there_whole_or_not_at_all(directory):
    folder = written(directory, 2)
    assert directory.checkpoint_steps() == []
    directory.publish_checkpoint(folder, 2)
    assert directory.checkpoint_steps() == [2]
    assert (directory.checkpoint(2) / "optimizer.pt").read_text() == "optimizer.pt of step 2"


def test_strange_names_among_the_checkpoints_are_no_checkpoints(directory):
    for name in ("step-old", "step-00000004.bak", ".old-00000002", ".writing"):
        (directory.checkpoints / name).mkdir()
    assert directory.checkpoint_steps() == []
    directory.clear_unfinished()
    assert sorted(path.name for path in directory.checkpoints.iterdir()) == ["step-00000004.bak", "step-old"]


def test_the_last_and_the_best_checkpoint_stay_and_the_best_without_its_optimizer(directory):
    for step, accuracy in ((2, 0.5), (4, 0.75), (6, 0.75), (8, 0.25)):
        directory.append(directory.evaluations_file, {"step": step, "accuracy": accuracy})
        directory.publish_checkpoint(written(directory, step), step)
        directory.prune_checkpoints(("optimizer*",))
    assert directory.checkpoint_steps() == [4, 8]  # the earlier of two equals
    assert [path.name for path in directory.checkpoint(4).iterdir()] == ["model.safetensors"]
    assert len(list(directory.checkpoint(8).iterdir())) == 2


def test_without_evaluations_the_last_checkpoint_stays(directory):
    for step in (2, 4):
        directory.append(directory.evaluations_file, {"step": step})  # no sample could be scored
        directory.publish_checkpoint(written(directory, step), step)
        directory.prune_checkpoints(("optimizer*",))
    assert directory.checkpoint_steps() == [4]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "status.json"
    write_atomically(file, "old")
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        try:
            write_atomically(file, "new" * 100)
        except RunError as error:
            os._exit(0 if "status.json cannot be written" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_run_id_is_kept_by_the_directory_and_is_no_others(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = RunDirectory(tmp_path / "a").run_id()
    assert RunDirectory(tmp_path / "a").run_id() == first and len(first) == 8
    assert RunDirectory(tmp_path / "b").run_id() != first


def test_run_id_of_processes_that_ask_at_the_same_time_is_one(tmp_path, monkeypatch):
    """A second process asks, and is answered, between the first one's look at the folder and what it writes."""
    drawn = []

    def drawn_late(digits: int) -> str:
        monkeypatch.undo()
        drawn.append(RunDirectory(tmp_path).run_id())
        return "0123abcd"

    monkeypatch.setattr("otb.records.secrets.token_hex", drawn_late)
    assert [RunDirectory(tmp_path).run_id()] == drawn
    assert [path.name for path in tmp_path.iterdir()] == ["run_id"]


def test_status_tells_where_a_run_stands(directory):
    assert directory.status() == {}
    directory.write_status("running", step=3, steps=8)
    status = directory.status()
    assert (status["state"], status["step"], status["steps"]) == ("running", 3, 8)
    assert json.loads(directory.status_file.read_text()) == status
