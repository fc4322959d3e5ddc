"""Tests `python experiments/variance.py`: its output, that it measures nothing twice, and its refusals."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

from experiments.variance import apply_quick, check, directory
from otb.laboratory.scores import Measured
from otb.records import RunDirectory
from tests.support import commands
from tests.support.commands import ROOT
from tests.support.recipes import composed

SMALL = {
    "task._target_": "tests.support.parity_task.Parity",
    "task.train_prompts": 10,
    "task.eval_prompts": 4,
    "task.max_completion_length": 6,
    "prompts": 3,
    "samples": 8,
    "group_sizes": "[2,4]",
    "fit_steps": 2,
    "prompts_per_step": 2,
    "partitions": 2,
    "sketch": 61,
    "oracle.prompts": 1,
    "oracle.rollouts": 1,
    "oracle.continuations": 4,
    "workers": 1,
}
BASELINES = {path.stem for path in (ROOT / "conf" / "baseline").glob("*.yaml")}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("logs") / "log"


def laboratory(log, policy, runs_dir, quick=True, **changed) -> str:
    """Runs the command to its end and returns its output. Keys of `changed` have `__` for a dot."""
    values = SMALL | {"model.name": policy, "runs_dir": runs_dir}
    values |= {key.replace("__", "."): value for key, value in changed.items()}
    given = [f"{key}={value}" for key, value in values.items()]
    return commands.done(given, log, script="variance", quick=quick)


def the_folder(runs_dir):
    (config,) = (runs_dir / "variance").glob("*/config.yaml")
    return config.parent


def times(folder) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "prompts").iterdir()}


@pytest.fixture(scope="module")
def runs(policy, tmp_path_factory, log):
    """Returns name -> checkpoint of a run of two steps that trained the whole policy or an adapter."""
    found = {}
    for name, changed in (("whole", {}), ("adapter", {"model__lora__r": 2})):
        runs_dir = tmp_path_factory.mktemp(name)
        commands.done(commands.arguments(runs_dir, model__name=policy, steps=2, **changed), log)
        run = RunDirectory(commands.the_run(runs_dir))
        found[name] = run.checkpoint(max(run.checkpoint_steps()))
    return found


@pytest.fixture(scope="module")
def measured(policy, runs, tmp_path_factory, log):
    """Returns the folder with the measurement of a checkpoint, and the command's output."""
    runs_dir = tmp_path_factory.mktemp("measured")
    printed = laboratory(log, policy, runs_dir, quick=False, checkpoint=runs["whole"])
    return the_folder(runs_dir), printed


def test_measurement_of_a_checkpoint_leaves_its_tables_and_figures_and_names_every_baseline(measured):
    folder, printed = measured
    assert folder.name.startswith("arithmetic-tiny-step-00000002-")
    for name in ("config.yaml", "moments.csv", "estimators.csv", "proxy.csv", "tokens.parquet"):
        assert (folder / name).stat().st_size > 0
    figures = {path.name for path in (folder / "figures").iterdir()}
    assert figures == {f"{name}.{end}" for name in ("noise", "bias", "proxy") for end in ("png", "pdf", "csv")}
    assert all(path.stat().st_size > 100 for path in (folder / "figures").iterdir())
    assert all(f" {name} " in printed for name in BASELINES)
    assert "N = 2" in printed and "N = 4" in printed and "3 prompts" in printed and str(folder) in printed

    results = pd.read_csv(folder / "estimators.csv")
    assert set(results.estimator) == BASELINES and (results.groupby("estimator").group_size.nunique() == 2).all()
    rows = pd.read_csv(folder / "moments.csv")
    assert len(rows) == 3 * 2 * len(BASELINES) and rows[["power", "signal", "overlap", "truth"]].notna().all().all()
    assert (rows.oracle_energy.notna() == (rows.prompt == 0)).all()
    assert rows.groupby("prompt").truth.nunique().eq(1).all()  # the same truth for every estimator
    # rloo is group_mean times N / (N - 1), to the rounding of float32
    by = rows.set_index(["estimator", "group_size", "prompt"])
    for size in (2, 4):
        ratio = by.power["rloo"][size] / by.power["group_mean"][size]
        np.testing.assert_allclose(ratio[by.power["rloo"][size] > 0], (size / (size - 1)) ** 2, rtol=1e-4)
    tokens = pd.read_parquet(folder / "tokens.parquet")
    kept = [Measured.load(folder / "prompts" / f"judged-{i:04d}-8.npz") for i in range(3)]
    assert len(tokens) == sum(prompt.lengths.sum() for prompt in kept)


def test_what_is_missing_is_measured_again_to_the_digit_and_what_is_there_is_left_alone(measured, policy, runs, log):
    """This is the state after a kill, because only complete files have their final names."""
    folder, _ = measured
    results, before = (folder / "estimators.csv").read_bytes(), times(folder)
    missing = ["judged-0001-8.npz", "fit-0002-4.npz", *(name for name in before if name.startswith("oracle"))]
    assert len(before) == 3 + 4 + 1 and len(missing) == 3
    for name in missing:
        (folder / "prompts" / name).unlink()
    laboratory(log, policy, folder.parent.parent, checkpoint=runs["whole"])
    assert (folder / "estimators.csv").read_bytes() == results
    after = times(folder)
    assert after.keys() == before.keys() and {name for name in after if after[name] != before[name]} == set(missing)


def test_other_estimators_group_sizes_and_partitions_measure_nothing_again(measured, policy, runs, log):
    folder, _ = measured
    before = times(folder)
    changed = {"group_sizes": "[4]", "estimators": "[otb]", "partitions": 3, "prompts": 2}
    printed = laboratory(log, policy, folder.parent.parent, checkpoint=runs["whole"], **changed)
    assert times(folder) == before and "exact scores: 2 done, 2 of them earlier" in printed
    results = pd.read_csv(folder / "estimators.csv")
    assert list(results.estimator) == ["rloo", "energy_probe", "otb"] and (results.prompts == 2).all()


@pytest.mark.parametrize("trained", [True, False], ids=["of a run", "fresh"])
def test_adapter_is_measured_in_its_own_parameters(policy, runs, tmp_path, log, trained):
    """A fresh adapter is drawn once and kept; its B is 0, and only B has a gradient."""
    changed = {"checkpoint": runs["adapter"]} if trained else {"model__lora__r": 2}
    laboratory(log, policy, tmp_path, prompts=2, oracle__prompts=0, group_sizes="[2]", estimators="otb", **changed)
    folder = the_folder(tmp_path)
    assert (folder / "adapter").exists() == (not trained)
    found = Measured.load(folder / "prompts" / "judged-0000-8.npz")
    assert (found.token_norms > 0).any() and np.isfinite(found.sketches).all()
    assert "energy_ratio" not in pd.read_csv(folder / "estimators.csv")


def test_a_measurement_is_of_the_weights_and_of_the_sandbox_where_programs_run(policy, tmp_path):
    shutil.copytree(policy, tmp_path / "policy")
    weights = tmp_path / "policy" / "model.safetensors"

    def found(*overrides: str):
        return directory(composed(*overrides, command="variance"), {"task": "arithmetic", "model": "tiny"})

    plain, tools, of_folder = [], ["task=arithmetic_tools"], [f"model.name={tmp_path / 'policy'}"]
    before = found(*of_folder)
    weights.write_bytes(weights.read_bytes()[:-1] + b"1")
    assert found(*of_folder) != before
    assert found(*plain, "sandbox.limits.wall_seconds=9") == found(*plain, "sandbox.workers=2") == found(*plain)
    assert found(*tools, "sandbox.workers=2") == found(*tools) != found(*tools, "sandbox.limits.wall_seconds=9")


# ---- refusals

REFUSED = {
    "group_sizes=[4,80]": ("group_sizes=[4, 80]", "samples / 2 = 64", "Try group_sizes=[4,8]"),
    "group_sizes=4": ("group_sizes=4", "whole numbers from 2", "Try group_sizes=[4,8]"),
    "estimators=[otb,otb_lo]": ("otb_lo is not a baseline", "Did you mean otb_loo?", "Known: "),
    "estimators=rlo": ("rlo is not a baseline", "Did you mean rloo?", "Known: "),
    "checkpoint=nowhere/step-1": ("checkpoint=nowhere/step-1", "is not a folder", "Give RUN/checkpoints"),
    "oracle.continuations=7": ("oracle.continuations=7", "must be even", "Try oracle.continuations=8"),
    "oracle.prmpts=7": ("oracle.prmpts", "no key of oracle", "Did you mean prompts?"),
    "samples=3": ("samples=3", "whole number >= 4", "Try samples=4"),
    "workers=0": ("workers=0", "whole number >= 1", "Try workers=1"),
    "quick=perhaps": ("quick=perhaps", "true or false", "Try quick=false"),
    "temperature=0": ("temperature=0", "positive number", "Try temperature=1.0"),
    "baseline=otb": ("baseline", "no key of this project", "estimators"),
    "task=gsm8": ("task=gsm8", "not one of the choices", "Did you mean gsm8k?"),
    "task=math500": ("task math500 has train_split=null", "rows are for evaluation", "Try task=gsm8k"),
    "task=gsm8k": ("path='openai/gsm8k'", "not in the cache", "python experiments/prefetch.py --dataset openai/gsm8k"),
    "model.lora.lora_alfa=4": ("model.lora.lora_alfa", "no field of peft.LoraConfig", "Did you mean lora_alpha?"),
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_cannot_be_measured_is_refused_in_one_line(given, tmp_path, log):
    code, printed = commands.run([given, f"runs_dir={tmp_path / 'runs'}"], log, script="variance")
    assert code == 2 and printed.startswith("error: ") and printed.count("\n") == 1
    for part in REFUSED[given]:
        assert part in printed
    assert not (tmp_path / "runs").exists()


def test_the_command_as_typed_refuses_before_it_imports_anything_heavy(tmp_path):
    done = commands.run_light(["estimators=rlo", f"runs_dir={tmp_path}"], script="variance")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: ")


def test_too_few_prompts_are_refused_with_what_would_fit(policy, tmp_path, log):
    values = SMALL | {"model.name": policy, "runs_dir": tmp_path, "fit_steps": 4}
    code, printed = commands.run([f"{key}={value}" for key, value in values.items()], log, script="variance")
    assert code == 2 and "need 11 prompts, but the task has 10" in printed and "Traceback" not in printed


def test_a_policy_that_is_not_sampled_from_its_softmax_is_refused(policy, tmp_path, log):
    shutil.copytree(policy, tmp_path / "policy")
    file = tmp_path / "policy" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"typical_p": 0.9}))
    values = SMALL | {"model.name": tmp_path / "policy", "runs_dir": tmp_path}
    code, printed = commands.run([f"{key}={value}" for key, value in values.items()], log, script="variance")
    assert code == 2 and "error: typical_p=0.9 in the model's generation_config.json" in printed


def test_quick_changes_what_the_command_line_does_not_set():
    cfg = composed("quick=true", "samples=40", command="variance")
    apply_quick(cfg, ["quick", "samples"])
    assert (cfg.prompts, cfg.samples, cfg.oracle.prompts) == (12, 40, 4) and list(cfg.group_sizes) == [4, 8]
    assert set(check(cfg)) == BASELINES and check(cfg)[:2] == ["rloo", "energy_probe"]
