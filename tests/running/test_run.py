"""The commands of the README, typed as a user types them: the default run, a sweep, real data, --help."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.keys import TITLES
from experiments.running.command_line import refuse_unknown_choices
from otb.errors import RunError
from tests.support import commands
from tests.support.commands import ROOT, rows, run_command_line, run_light


def run_directories(runs: Path) -> list[Path]:
    return sorted(path.parent for path in runs.glob("*/*/config.yaml"))


def test_default_run_lifts_held_out_accuracy_by_a_quarter_and_leaves_a_picture(tmp_path):
    """The first quarter of it: a constant learning rate makes its steps those of the whole run."""
    done = run_command_line(["steps=20", f"runs_dir={tmp_path}"])
    assert done.returncode == 0, done.stderr[-3000:]
    (directory,) = run_directories(tmp_path)
    assert directory.relative_to(tmp_path) == Path("arithmetic-tiny/otb-n4-seed0")
    evaluations = rows(directory / "evaluations.jsonl")
    assert 0.35 <= evaluations[0]["accuracy"] <= 0.55  # .45, from 512 samples: four standard errors are .1
    assert [row["step"] for row in evaluations] == [0, 20]
    assert evaluations[-1]["accuracy"] >= evaluations[0]["accuracy"] + 0.25
    assert [row["step"] for row in rows(directory / "metrics.jsonl")] == list(range(1, 21))
    assert (directory / "learning_curve.png").stat().st_size > 10_000
    (
        first,
        *_,
    ) = done.stdout.splitlines()
    assert first == f"run directory: {directory}" and "accuracy" in done.stdout


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> tuple[list[Path], str]:
    """The runs of a sweep and what it printed.

    In one process; tests/sweeps/test_local_sweep.py has the default launcher, with a process for each run.
    """
    home = tmp_path_factory.mktemp("swept")
    given = ["-m", "hydra/launcher=basic", "baseline=otb,grpo", "group_size=2,4", "steps=2", "task.eval_prompts=8"]
    given += ["rollouts.every=1", "rollouts.groups=16", f"runs_dir={home / 'runs'}"]
    code, printed = commands.run(given, home / "log")
    assert code == 0, printed
    return run_directories(home / "runs"), printed


def test_sweep_leaves_comparable_runs_that_saw_the_same_prompts_and_a_table(swept):
    directories, printed = swept
    names = ["grpo-n2-seed0", "grpo-n4-seed0", "otb-n2-seed0", "otb-n4-seed0"]
    assert [path.name.removesuffix("-task.eval_prompts=8") for path in directories] == names
    assert all(f"│ {name}" in printed for name in names)
    prompts, before = [], set()
    for directory in directories:
        kept = pd.read_parquet(directory / "rollouts" / "step-00000002.parquet")
        prompts.append(list(kept.groupby("prompt")["prompt_text"].first()))
        before.add(rows(directory / "evaluations.jsonl")[0]["accuracy"])
    assert prompts[0] == prompts[1] == prompts[2] == prompts[3] and len(set(prompts[0])) == 16
    assert len(before) == 1  # the same policy, evaluated with the same draws


def test_kept_rollouts_hold_what_the_estimator_did_to_each_token(swept):
    grpo, otb = (pd.read_parquet(swept[0][i] / "rollouts" / "step-00000002.parquet") for i in (1, 3))
    for _, row in otb.iterrows():
        assert len(row.tokens) == len(row.baselines) == len(row.log_probs) == len(row.energies)
        assert np.allclose(row.reward - row.baselines, row.advantages, atol=1e-6)
        w = np.diff(row.energies, prepend=0)
        assert (w >= np.expm1(row.log_probs) ** 2 - 1e-4).all()  # (1 - pi)^2 is the first of the two terms of w
        assert row.ending == ("length" if len(row.tokens) == 64 and row.tokens[-1] != "<|im_end|>" else "end")
    for _, group in grpo.groupby("prompt"):
        assert np.allclose([row.mean() for row in group.baselines], group.reward.mean())
    assert grpo.log_probs.isna().all() and grpo.energies.isna().all()  # no pass was made, and none is for the record


def test_gsm8k_rows_run_through_the_whole_path(shared, tmp_path):
    """The tiny policy scores about 0 on them: the point is that the path is real."""
    shutil.copytree(shared / "data" / "gsm8k", tmp_path / "gsm8k")
    given = ["task=gsm8k", f"task.path={tmp_path / 'gsm8k'}", "task.max_eval_rows=8", "task.max_completion_length=32"]
    given += ["steps=1", "prompts_per_step=4", f"runs_dir={tmp_path / 'runs'}"]
    code, printed = commands.run(given, tmp_path / "log")
    assert code == 0, printed
    (directory,) = run_directories(tmp_path / "runs")
    (row,) = rows(directory / "metrics.jsonl")
    assert row["own_tokens"] > 0 and 0 <= row["reward_mean"] <= 1
    data = json.loads((directory / "environment.json").read_text())["data"]
    assert "train" in json.dumps(data) and "sha256" in json.dumps(data)


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (["--help"], 0),
        (["--cfg", "job"], 0),
        (["steps=5", "--cfg", "job"], 0),
        (["experiment=stability", "--cfg", "job"], 0),
        (["baseline=ottb"], 2),
        (["group_size=0"], 2),
    ],
)
def test_help_configuration_and_refusals_answer_before_anything_heavy_is_imported(arguments, exit_code, tmp_path):
    assert run_light(arguments, cwd=tmp_path).returncode == exit_code


def test_help_has_a_line_about_every_choice_and_names_the_page_of_keys():
    text = run_command_line(["--help"]).stdout
    assert "docs/keys.md" in text and "hydra/launcher: where" in text
    for group in TITLES:
        for path in (ROOT / "conf" / group).glob("*.yaml"):
            (line,) = re.findall(
                rf"^  {re.escape(path.stem)} .*$", text.partition(f"\n{group}: ")[2].partition("\n\n")[0], re.M
            )
            assert len(line.split()) > 3 and len(line) <= 120, line
    assert "rloo                 Leave-one-out baseline: each rollout is compared with the other rollouts" in text


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ("max_completion_length=32", "Did you mean task.max_completion_length?"),
        ("report_to=wandb", "Did you mean trainer.report_to?"),
        ("lr=1e-3", "Did you mean learning_rate?"),
        ("num_generations=8", "Did you mean group_size?"),
        ("max_steps=8", "Did you mean steps?"),
        ("save_strategy=no", "Did you mean trainer.save_strategy?"),
        ("weight_deca=0.1", "Did you mean trainer.weight_decay?"),
        ("grup_size=8", "Did you mean group_size?"),
        ("model=Qwen/Qwen2.5-0.5B", "Try model=hub model.name=Qwen/Qwen2.5-0.5B."),
    ],
)
def test_a_wrong_key_is_answered_with_the_right_one_at_whatever_depth(argument, advice):
    with pytest.raises(RunError, match=re.escape(advice)):
        refuse_unknown_choices([argument])


@pytest.mark.parametrize("argument", ["runs/arithmetic-tiny/otb-n4-seed0", "runs/arithmetic-tiny/otb-log_energy=True"])
def test_a_run_directory_without_its_key_is_answered_with_the_key(argument):
    with pytest.raises(RunError, match=re.escape(f"Try run={argument}.")):
        refuse_unknown_choices([argument], "evaluate")


@pytest.mark.parametrize("group", ["baseline", "task", "model", "sandbox", "experiment", "trainer", "hydra/launcher"])
def test_every_yaml_composes(group):
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for path in (ROOT / "conf" / group).glob("*.yaml"):
            assert compose("config", overrides=[f"{group}={path.stem}"])


@pytest.mark.parametrize("group", ["task", "model", "sandbox"])
def test_every_yaml_composes_into_a_measurement(group):
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for path in (ROOT / "conf" / group).glob("*.yaml"):
            assert compose("variance", overrides=[f"{group}={path.stem}"]).oracle.continuations
            assert compose("forecast", overrides=[f"{group}={path.stem}"]).rollouts
