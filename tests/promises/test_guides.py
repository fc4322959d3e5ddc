"""The guides of docs/, typed as they stand into a copy of the repository: their files, their commands, their tests."""

import ast
import json
import os
import shlex
import shutil

import pytest

from tests.support.guides import apply, copy_of_repository, read_guide
from tests.support.library_server import LibraryServer

# Runs one command line after another in one process, so that torch and TRL are imported once.
DRIVER = """
import json, sys
from experiments.run import command_line
for arguments in json.loads(sys.argv[1]):
    command_line(arguments)
"""
# Tells what figures call the runs below a folder, and draws nothing.
LABELS = """
import json, sys
from analysis.runs.load import load
runs = load(sys.argv[1]).runs
print(json.dumps(sorted(set(runs.arm[runs.left_out == ""]))))
"""
# A run of one step on few prompts.
SMALL = [
    "steps=1",
    "prompts_per_step=2",
    "group_size=2",
    "task.max_completion_length=24",
    "evaluation.samples=1",
]
FEW_PROMPTS = ["task.train_prompts=4", "task.eval_prompts=2"]
FEW_WARM_STEPS = ["model.warm_start.steps=2", "model.warm_start.careful_steps=1"]


class Copy:
    """A copy of the repository into which a guide was typed."""

    def __init__(self, folder, cache, libraries):
        self.folder, self.runs, self.libraries = folder, folder / "guide_runs", libraries
        self.environment = os.environ | {"PYTHONPATH": str(folder), "OTB_CACHE": str(cache)}

    def python(self, *arguments) -> str:
        """Runs Python in the copy -> what it printed."""
        command = list(map(str, arguments))
        done = self.libraries.run(command, self.folder, self.environment)
        assert done.returncode == 0, f"python {shlex.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def refusal(self, *arguments) -> str:
        """Runs a command that is refused -> the message."""
        done = self.libraries.run(list(arguments), self.folder, self.environment)
        assert (done.returncode, done.stdout) == (2, ""), done
        return done.stderr

    def documented_keys(self) -> list[str]:
        """The keys that docs/keys.md explains, one for each row of its tables."""
        rows = (self.folder / "docs" / "keys.md").read_text().splitlines()
        return [row.split("`")[1] for row in rows if row.startswith("| `")]

    def follow(self, commands, changes, further=()) -> None:
        """Runs the commands of a guide: modules as they stand, then pytest, once for commands that name the same files.

        Then come the runs, with `changes(overrides)` added. further: overrides of runs that are made beside them.
        """
        runs = [[*overrides, f"runs_dir={self.runs}"] for overrides in further]
        tests = {}  # files: what -k selects of them
        for command in dict.fromkeys(commands):
            arguments = shlex.split(command)[1:]
            if arguments[0] == "experiments/run.py":
                in_this_process = ["hydra/launcher=basic"] if "-m" in arguments else []
                runs.append([*arguments[1:], *changes(arguments[1:]), *in_this_process, f"runs_dir={self.runs}"])
            elif ">" in arguments:
                *typed, _, file = arguments
                (self.folder / file).write_text(self.python(*typed))
            elif arguments[:2] == ["-m", "pytest"]:
                files, _, chosen = command.partition(" -k ")
                tests.setdefault(files, []).append(chosen.strip('"'))
        for files, chosen in tests.items():
            selected = ["-k", " or ".join(chosen)] if all(chosen) else []
            arguments = [*shlex.split(files)[1:], *selected, "-n", "0", "-p", "no:cacheprovider"]
            assert " passed" in self.python(*arguments)
        self.python("-c", DRIVER, json.dumps(runs))

    def rows(self, pattern: str) -> list[list[dict]]:
        """The rows of metrics.jsonl of each run whose directory matches, in the order of their names."""
        files = sorted(self.runs.glob(f"{pattern}/metrics.jsonl"))
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Runs Python with the libraries imported once for all guides."""
    server = LibraryServer(tmp_path_factory.mktemp("libraries"))
    yield server
    server.close()


@pytest.fixture
def typed(tmp_path, libraries):
    """Gives a function: the name of a guide -> the guide and a copy of the repository with its files."""

    def type_in(name):
        guide = read_guide(name)
        folder = copy_of_repository(tmp_path / name)
        apply(guide.edits, folder)
        return guide, Copy(folder, tmp_path / "cache", libraries)

    return type_in


def test_guide_to_baselines_gives_arms_that_pass_the_tests_and_are_labelled_by_their_names(typed, policy):
    guide, copy = typed("add_a_baseline")
    written = ["group_median.py", "group_median.yaml", "running_mean.py", "running_mean.yaml"]
    assert [edit.path.rsplit("/", 1)[1] for edit in guide.edits] == written
    copy.follow(guide.commands, lambda overrides: [*SMALL, *FEW_PROMPTS, f"model.name={policy}"])
    assert {"group_median", "running_mean"} <= set(
        copy.python("experiments/run.py", "--help").replace(",", " ").split()
    )
    arms = json.loads(copy.python("-c", LABELS, copy.runs))
    names = ("OTB", "group median", "running mean", "running mean decay=0.5")
    assert arms == sorted(f"{name}, N=2" for name in names)
    message = "baseline.decay=2 must be in [0, 1). Try baseline.decay=0.9."
    assert f'"{message}"' in guide.text
    assert copy.refusal("experiments/run.py", "baseline=running_mean", "baseline.decay=2") == f"error: {message}\n"
    assert "baseline.decay" in copy.documented_keys()


def test_guide_to_tasks_gives_tasks_that_run_from_a_yaml_from_a_file_and_with_a_tool(typed):
    guide, copy = typed("add_a_task")
    commands = guide.commands
    if shutil.which("bwrap") is None and "CI" not in os.environ:
        commands = [command for command in commands if "reversal_tools" not in command]

    def changes(overrides):
        if "task=questions" in overrides:
            return [*SMALL, "model.warm_start.steps=1", "model.warm_start.careful_steps=0"]
        return [*SMALL, *FEW_PROMPTS, *FEW_WARM_STEPS]

    copy.follow(commands, changes)
    assert copy.documented_keys().count("task.max_completion_length") == copy.documented_keys().count("task.path") == 1
    for task in [command.split("task=")[1].split()[0] for command in commands if "task=" in command]:
        ((row,),) = copy.rows(f"{task}-tiny/*")
        assert row["own_tokens"] > 0 and 0 <= row["reward_mean"] <= 1
    assert copy.rows("reversal_tools-tiny/*")[0][0]["turns_mean"] >= 1 or "reversal_tools" not in str(commands)


def test_demonstrations_of_the_guide_are_right_as_often_as_their_noise_allows(typed):
    """Of the tasks of the guide, by their own reward: at noise 0 all are right, at 1 about half."""
    _, copy = typed("add_a_task")
    code = """
from otb.tasks.reversal import Reversal
from otb.tasks.reversal_tools import ReversalTools
for task in (Reversal(), ReversalTools()):
    for noise in (0.0, 1.0):
        chats = task.demonstrations(0, 400, noise)
        asked = [next(m["content"] for m in chat if m["role"] == "user") for chat in chats]
        print(sum(task.reward(chats, [digits[::-1] for digits in asked])) / 400)
"""
    right = [float(line) for line in copy.python("-c", code).split()]
    assert right[0] == right[2] == 1 and 0.4 < right[1] < 0.6 and 0.65 < right[3] < 0.85


def test_guide_to_metrics_gives_a_metric_in_the_records_the_table_and_a_figure(typed, policy):
    guide, copy = typed("add_a_metric")
    assert guide.commands[0] == "python -m otb.records.metric_names > docs/metrics.md"
    changed = [*SMALL, *FEW_PROMPTS, f"model.name={policy}"]
    copy.follow(guide.commands, lambda overrides: changed, further=[[*changed, "temperature=0.5"]])
    assert [0 <= row["solved_groups"] <= 1 for (row,) in copy.rows("*/*")] == [True, True]
    printed = copy.python("-c", guide.script.replace('load("runs")', f"load({str(copy.runs)!r})"))
    assert len(ast.literal_eval(printed)) == 2  # settings, of which one is drawn
    assert len((copy.folder / "solved_groups.csv").read_text().splitlines()) == 2  # the names and one seed at one step
    assert (copy.folder / "solved_groups.png").stat().st_size
