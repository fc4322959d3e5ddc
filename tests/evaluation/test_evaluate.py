"""Tests `python experiments/evaluate.py`: its output, that no kill changes a sample, and its refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial

import pandas as pd
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from analysis.evaluations import measures, read_samples
from experiments.evaluation import weights
from experiments.evaluation.command import check_files, plan
from experiments.evaluation.folder import Batches, EvaluationFolder, batch_seed, hold, samples_together
from otb.errors import RunError
from otb.files import sha256_of
from otb.policies.tiny_warm_start import WarmStart, warm_start
from otb.records import RunDirectory
from otb.tasks.arithmetic_tools import ArithmeticTools
from tests.support import commands
from tests.support.commands import ROOT, rows, wait_for
from tests.support.holds import Hold
from tests.support.recipes import composed
from tests.support.waiting import PATIENCE_SECONDS

SMALL = {
    "task._target_": "tests.support.parity_task.Parity",
    "task.eval_prompts": 5,
    "task.max_completion_length": 6,
    "k": 4,
    "rollouts_per_batch": 8,  # 20 samples: batches of 7, 7 and 6
}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("logs") / "log"


def arguments(folder, policy, **changed) -> list[str]:
    """Returns the arguments of a small evaluation. Keys of `changed` have `__` for a dot; None removes a key."""
    values = SMALL | {"model.name": policy, "evaluations_dir": folder}
    values |= {key.replace("__", "."): value for key, value in changed.items()}
    return [f"{key}={value}" for key, value in values.items() if value is not None]


def evaluated(log, folder, policy, **changed) -> str:
    """Runs the command to its end and returns its output."""
    return commands.done(arguments(folder, policy, **changed), log, script="evaluate")


def the_evaluation(folder) -> EvaluationFolder:
    (results,) = folder.rglob("results.json")
    return EvaluationFolder(results.parent)


@pytest.fixture(scope="module")
def uninterrupted(policy, tmp_path_factory, log):
    """Returns the evaluation that others must equal, and the command's output."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    printed = evaluated(log, folder, policy)
    return the_evaluation(folder), printed


def assert_same_samples(mine: EvaluationFolder, other: EvaluationFolder) -> None:
    for name in ("samples_file", "problems_file", "results_file", "table_file"):
        assert getattr(mine, name).read_bytes() == getattr(other, name).read_bytes(), name


# ---- output


def test_every_sample_is_kept_and_the_results_are_those_counted_from_them(uninterrupted):
    folder, printed = uninterrupted
    drawn = rows(folder.samples_file)
    assert sorted((row["problem"], row["sample"]) for row in drawn) == [(p, s) for p in range(5) for s in range(4)]
    assert len({row["response"] for row in drawn}) > 15
    for row in drawn:  # the tiny tokenizer's ends: its own, and every tenth token of this policy
        assert row["own_tokens"] <= 6 and row["ending"] == ("length" if row["own_tokens"] == 6 else row["ending"])
        text = row["response"].removesuffix("<|im_end|>")
        assert row["reward"] in (0.0, 1.0) and text
    assert {row["ending"] for row in drawn} == {"end", "length"}

    results = json.loads(folder.results_file.read_text())
    assert (results["task"], results["policy"], results["step"], results["k"]) == ("arithmetic", "policy", None, 4)
    table = measures(read_samples(folder.path), 4)
    pd.testing.assert_frame_equal(pd.read_csv(folder.table_file), table, check_exact=False, rtol=1e-12)
    accuracy = table[table.measure == "avg_at_k"].estimate.item()
    assert accuracy == sum(row["reward"] for row in drawn) / 20
    assert f"{accuracy:.3f}" in printed and "avg@4" in printed and "pass@4" in printed and str(folder.path) in printed
    problems = rows(folder.problems_file)
    assert [row["problem"] for row in problems] == [0, 1, 2, 3, 4] and problems[0]["prompt"][0]["role"] == "user"
    environment = json.loads((folder.path / "environment.json").read_text())
    assert environment["data"]["eval"]["rows"] == 5 and environment["model_sha256"] and environment["command"]


def test_the_same_command_draws_nothing_again_and_imports_no_torch(uninterrupted, policy):
    folder, _ = uninterrupted
    before = folder.samples_file.stat().st_mtime_ns
    program = "import sys; from experiments.evaluate import command_line; command_line(sys.argv[1:]); "
    program += "assert not {'torch', 'trl'} & set(sys.modules)"
    command = [sys.executable, "-c", program, *arguments(folder.path.parents[1], policy)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "avg@4" in done.stdout and folder.samples_file.stat().st_mtime_ns == before


def test_a_larger_k_only_adds_samples_and_a_smaller_one_uses_the_first(uninterrupted, policy, tmp_path, log):
    folder, _ = uninterrupted
    shutil.copytree(folder.path.parents[1], tmp_path / "more")
    evaluated(log, tmp_path / "more", policy, k=8)
    more = the_evaluation(tmp_path / "more")
    assert more.samples_file.read_bytes().startswith(folder.samples_file.read_bytes())
    assert len(rows(more.samples_file)) == 40 and more.results()["k"] == 8
    evaluated(log, tmp_path / "eight", policy, k=8)
    assert_same_samples(more, the_evaluation(tmp_path / "eight"))
    assert "avg@4" in evaluated(log, tmp_path / "more", policy, k=4)
    assert more.results()["measures"] == folder.results()["measures"] and more.results()["drawn"] == 8


def test_other_seeds_temperatures_batches_and_limits_are_other_evaluations(uninterrupted, policy, tmp_path, log):
    folder, _ = uninterrupted
    for changed in ({"seed": 1}, {"temperature": 0.7}, {"rollouts_per_batch": 5}, {"task__max_completion_length": 5}):
        evaluated(log, tmp_path / next(iter(changed)), policy, **changed)
        other = the_evaluation(tmp_path / next(iter(changed)))
        assert other.path.name != folder.path.name
        assert other.samples_file.read_bytes() != folder.samples_file.read_bytes()
    evaluated(log, tmp_path / "same", policy, trainer__use_cpu=True)
    assert the_evaluation(tmp_path / "same").path.name == folder.path.name


# ---- kills and processes


# The second batch is being drawn, and the first one is kept.
kill_in_its_second_batch = partial(commands.kill_at, "reward 2", script="evaluate")


def test_an_evaluation_killed_at_any_moment_goes_on_bit_for_bit(uninterrupted, policy, tmp_path, log):
    """Kills come between batches, and inside a batch between two lines or within a line."""
    expected, _ = uninterrupted
    lines = expected.samples_file.read_bytes().splitlines(keepends=True)
    given = arguments(tmp_path, policy)
    for kept, cut in ((7, b"".join(lines[7:10])), (14, b"".join(lines[14:16]) + lines[16][:20])):
        kill_in_its_second_batch(given, log, tmp_path / f"hold-{kept}")
        (file,) = tmp_path.rglob("samples.jsonl")
        assert file.read_bytes() == b"".join(lines[:kept]) and not list(tmp_path.rglob("results.json"))
        file.write_bytes(b"".join(lines[:kept]) + cut)
    evaluated(log, tmp_path, policy)
    assert_same_samples(the_evaluation(tmp_path), expected)
    starts = json.loads((file.parent / "environment.json").read_text())["starts"]
    assert len(starts) == 3


def test_a_second_command_is_refused_while_the_first_one_writes(policy, tmp_path, log):
    given = arguments(tmp_path, policy)
    hold = Hold(tmp_path / "hold", "reward 1")
    process = commands.start(given, log, script="evaluate", **hold.environment)
    hold.wait(process)
    code, printed = commands.run(given, log, script="evaluate")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert code == 2 and f"is in use by process {process.pid}" in printed


def test_two_processes_draw_what_one_draws(uninterrupted, policy, tmp_path):
    """Of three batches, the second process draws the last one in vain."""
    expected, _ = uninterrupted
    first, second = commands.run_two(arguments(tmp_path, policy), tmp_path / "log", script="evaluate")
    assert first[0] == second[0] == 0, first[1] + second[1]
    assert first[1].count("avg@4") == 1 and "avg@4" not in second[1]
    assert_same_samples(the_evaluation(tmp_path), expected)


def test_samples_of_other_problems_are_not_mixed(uninterrupted, policy, tmp_path, log):
    folder, _ = uninterrupted
    shutil.copytree(folder.path.parents[1], tmp_path / "other")
    other = the_evaluation(tmp_path / "other")
    other.results_file.unlink()
    other.problems_file.write_text(other.problems_file.read_text().replace('"answer": "', '"answer": "1'))
    code, printed = commands.run(arguments(tmp_path / "other", policy), log, script="evaluate")
    assert code == 2 and "holds samples of other problems" in printed and "evaluations_dir" in printed


# ---- batches


@pytest.mark.parametrize(
    "problems, samples, rollouts, parts", [(5, 4, 8, 1), (1, 1, 128, 1), (7, 2, 5, 2), (30, 4, 7, 4)]
)
def test_batches_hold_every_sample_once_and_are_of_one_size(problems, samples, rollouts, parts):
    batches = Batches(problems, samples, rollouts, parts)
    k = 3 * samples
    pairs = [batches.pairs(batch) for batch in range(batches.count(k))]
    assert sorted(pair for batch in pairs for pair in batch) == [(p, s) for p in range(problems) for s in range(k)]
    assert all(0 < len(batch) <= batches.size for batch in pairs)
    assert batches.size % parts == 0 and batches.size < rollouts + parts
    for batch, expected in enumerate(pairs):
        drawn = [batches.drawn_by(batch, part) for part in range(parts)]
        assert {len(rows) for rows, _ in drawn} == {batches.size // parts}
        assert [pair for rows, count in drawn for pair in rows[:count]] == expected
    rounds = [batches.pairs(batch) for batch in range(batches.count(samples))]
    assert pairs[: len(rounds)] == rounds  # a larger k only adds pairs


def test_seeds_of_batches_differ_by_seed_task_and_batch():
    seeds = {batch_seed(seed, task, batch) for seed in (0, 1) for task in ("a", "b") for batch in range(50)}
    assert len(seeds) == 200 and all(0 <= seed < 2**63 for seed in seeds)
    # printf '0 math500 3' | sha256sum starts with 3750ee25fd39c76f; kept samples were drawn with half of it as seed
    assert batch_seed(0, "math500", 3) == 0x3750EE25FD39C76F // 2
    assert [samples_together(k) for k in (1, 2, 3, 4, 6, 8, 32)] == [1, 2, 1, 4, 2, 4, 4]


def test_lines_that_are_not_the_next_sample_are_refused(tmp_path):
    folder, batches = EvaluationFolder(tmp_path), Batches(2, 1, 2)
    good = [{"problem": 0, "sample": 0}, {"problem": 1, "sample": 0}, {"problem": 0, "sample": 1}]
    folder.append(good)
    assert folder.resume(batches) == 1 and rows(folder.samples_file) == good[:2]
    folder.append([{"problem": 1, "sample": 1}])
    with pytest.raises(RunError, match="not the next sample"):
        folder.resume(batches)


# ---- runs


@pytest.fixture(scope="module")
def runs(policy, tmp_path_factory, log):
    """Returns name -> a run of four steps with at least two checkpoints that trained the whole policy or an adapter."""
    found = {}
    for name, changed in (("whole", {}), ("adapter", {"model__lora__r": 2})):
        runs_dir = tmp_path_factory.mktemp(name)
        given = commands.arguments(runs_dir, model__name=policy, steps=4, learning_rate=0.01, **changed)
        commands.done(given, log)
        found[name] = RunDirectory(commands.the_run(runs_dir))
    return found


def of_run(folder, run, **changed) -> list[str]:
    """Returns arguments that leave task and model to the run."""
    own = dict.fromkeys(("task___target_", "task__max_completion_length"))
    return arguments(folder, None, **(own | {"run": run.path, "task__eval_prompts": 5} | changed))


@pytest.mark.parametrize("name", ["whole", "adapter"])
def test_all_checkpoints_of_a_run_are_evaluated_as_each_would_be_by_itself(name, runs, policy, tmp_path, log):
    run = runs[name]
    steps = run.checkpoint_steps()
    printed = commands.done(of_run(tmp_path, run), log, script="evaluate")
    (of_all,) = (tmp_path / "parity").iterdir()
    assert of_all.name.startswith(f"arithmetic-tiny-{run.path.name[:20]}")
    assert [path.name for path in sorted(of_all.iterdir())] == [f"step-{step:08d}" for step in steps]
    assert not list((tmp_path / ".held").rglob("step-*"))
    assert f"({steps[-1]})" in printed and "peak" in printed and "final" in printed
    digests = set()
    for step in steps:
        mine = EvaluationFolder(of_all / f"step-{step:08d}")
        alone = tmp_path / f"alone-{step}"
        evaluated(log, alone, policy, checkpoint=run.checkpoint(step))
        assert mine.samples_file.read_bytes() == the_evaluation(alone).samples_file.read_bytes()
        for folder in (mine, the_evaluation(alone)):
            facts = json.loads((folder.path / "environment.json").read_text())
            file = run.checkpoint(step) / f"{'adapter_' * (name == 'adapter')}model.safetensors"
            assert facts["model"] == str(file.parent) and facts["model_sha256"][file.name] == sha256_of(file)
            assert facts.get("model_base", {}).get("model") == (str(policy) if name == "adapter" else None)
        digests.add(mine.samples_file.read_bytes())
    assert len(digests) == len(steps) == 1 + (len(steps) > 1)


def test_an_adapter_is_loaded_once_for_all_tasks(runs, policy, monkeypatch):
    loaded, load_model = [], weights.load_model
    monkeypatch.setattr(weights, "load_model", lambda *given: loaded.append(given) or load_model(*given))
    (cfg,) = planned(f"model.name={policy}").configurations.values()
    policies, run = weights.Policies(lambda *progress: None), runs["adapter"]
    checkpoint = run.checkpoint(run.checkpoint_steps()[-1])
    assert [policies.load(cfg, None, checkpoint) for _ in range(2)] == [True, False] and len(loaded) == 1
    assert (policies.source, policies.base) == (str(checkpoint), str(policy))


def test_two_processes_draw_of_a_run_what_one_draws(runs, tmp_path, log):
    """The first process holds each checkpoint; both processes then load its weights."""
    run = runs["adapter"]
    assert commands.run(of_run(tmp_path / "one", run), log, script="evaluate")[0] == 0
    first, second = commands.run_two(of_run(tmp_path / "two", run), tmp_path / "log", script="evaluate")
    assert first[0] == second[0] == 0, first[1] + second[1]
    assert first[1].count("peak without its luck") >= 1 and "peak" not in second[1]
    found = sorted((tmp_path / "one").rglob("results.json"))
    assert len(found) == len(run.checkpoint_steps())
    for expected in found:
        mine = tmp_path / "two" / expected.relative_to(tmp_path / "one")
        assert_same_samples(EvaluationFolder(mine.parent), EvaluationFolder(expected.parent))
    assert not (tmp_path / "two" / ".held").exists()


def test_a_run_brings_model_and_sampling_and_the_command_line_wins(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs["whole"].path, run)
    recorded = OmegaConf.load(run / "config.yaml")
    recorded.temperature = 0.9
    recorded.trainer.top_p = 0.8
    OmegaConf.save(recorded, run / "config.yaml")

    (own,) = planned(f"run='{run}'", "++task.eval_prompts=7").configurations.items()
    several = ["tasks=[arithmetic,math500]", "temperature=0.5", "++task.max_completion_length=9"]
    several = planned(f"run='{run}'", *several).configurations
    assert own[0] == "parity" and own[1].task == {**recorded.task, "eval_prompts": 7}
    assert own[1].model == recorded.model and (own[1].temperature, own[1].trainer.top_p) == (0.9, 0.8)
    assert list(several) == ["arithmetic", "math500"]
    for cfg in several.values():
        assert cfg.model == recorded.model and cfg.task.max_completion_length == 9
        assert (cfg.temperature, cfg.trainer.top_p) == (0.5, 0.8)


def test_a_run_of_another_start_in_the_same_folder_is_another_evaluation(runs, tmp_path, log):
    shutil.copytree(runs["whole"].path, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    for started in ("2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"):
        facts = json.loads(run.environment_file.read_text())
        facts["starts"][0]["started"] = started
        run.environment_file.write_text(json.dumps(facts))
        assert commands.run(of_run(tmp_path / "found", run, k=1), log, script="evaluate")[0] == 0
    assert len(list((tmp_path / "found" / "parity").iterdir())) == 2


def test_a_checkpoint_that_its_run_removes_meanwhile_is_evaluated_to_the_end(runs, tmp_path, log):
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(runs["whole"].path, run.path)
    step = run.checkpoint_steps()[0]
    assert commands.run(of_run(tmp_path / "expected", run), log, script="evaluate")[0] == 0
    given = of_run(tmp_path / "found", run)
    kill_in_its_second_batch(given, log, tmp_path / "hold")
    shutil.rmtree(run.checkpoint(step))
    code, printed = commands.run(given, log, script="evaluate")
    assert code == 0 and f"│ {step} " in printed
    for expected in (tmp_path / "expected").rglob("results.json"):
        mine = tmp_path / "found" / expected.relative_to(tmp_path / "expected")
        assert_same_samples(EvaluationFolder(mine.parent), EvaluationFolder(expected.parent))
    assert not (tmp_path / "found" / ".held").exists()


def evaluated_steps(folder) -> set[int]:
    return {int(path.parent.name.removeprefix("step-")) for path in folder.rglob("results.json")}


def test_watching_evaluates_what_appears_and_ends_with_the_run(policy, tmp_path, log):
    given = commands.arguments(tmp_path / "runs", model__name=policy, steps=4, rollouts__every=0)
    hold = Hold(tmp_path / "hold", "row 3")
    training = commands.start(given, tmp_path / "training", **hold.environment)
    hold.wait(training)
    run = RunDirectory(commands.the_run(tmp_path / "runs"))
    watching = commands.start(of_run(tmp_path / "found", run, k=1, watch=True), log, script="evaluate")
    wait_for(lambda: evaluated_steps(tmp_path / "found"), watching)
    assert evaluated_steps(tmp_path / "found") == {2}
    hold.release()
    training.join(PATIENCE_SECONDS)
    assert training.exitcode == 0, (tmp_path / "training").read_text()
    watching.join(PATIENCE_SECONDS)
    assert watching.exitcode == 0, log.read_text()[-2000:]
    assert evaluated_steps(tmp_path / "found") == {2, 4}
    assert not list((tmp_path / "found" / ".held").rglob("step-*"))


def test_a_held_checkpoint_outlives_the_one_of_the_run_and_takes_no_space(tmp_path):
    checkpoint = tmp_path / "step-00000002"
    checkpoint.mkdir()
    for name in ("model.safetensors", "optimizer.pt"):
        (checkpoint / name).write_text(name)
    held = hold(checkpoint, tmp_path / "held" / "step-00000002", ("optimizer*",))
    assert (held / "model.safetensors").stat().st_ino == (checkpoint / "model.safetensors").stat().st_ino
    shutil.rmtree(checkpoint)
    assert [path.name for path in held.iterdir()] == ["model.safetensors"]
    assert hold(checkpoint, held, ()) == held
    assert hold(checkpoint, tmp_path / "held" / "step-00000004", ()) is None


# ---- tasks


def test_evaluation_only_tasks_are_evaluated_each_from_its_own_rows(shared, policy, tmp_path, log):
    given = [f"model.name={policy}", f"evaluations_dir={tmp_path}", "tasks=[math500,aime24]", "k=2"]
    given += [f"task.path='{shared}/data/${{task.name}}'", "task.max_eval_rows=3", "task.max_completion_length=8"]
    printed = commands.done(given, log, script="evaluate")
    for task in ("math500", "aime24"):
        folder = the_evaluation(tmp_path / task)
        drawn = rows(folder.samples_file)
        assert len(drawn) == 6 and {"outcome", "answer", "vote", "reward"} <= drawn[0].keys()
        data = json.loads((folder.path / "environment.json").read_text())["data"]["eval"]
        assert data["path"] == f"{shared}/data/{task}" and "test.parquet" in data["sha256"]
    assert "math500" in printed and "aime24" in printed and "maj@2" in printed


def test_a_task_with_tools_counts_both_kinds_of_tokens_and_resumes(tmp_path, log):
    caller = warm_start(ArithmeticTools(), WarmStart(steps=60, careful_steps=60, batch=16), tmp_path)
    given = [f"model.name={caller}", "tasks=[arithmetic_tools,arithmetic]", "sandbox=unsafe_subprocess", "k=2"]
    given += ["task.eval_prompts=8", "rollouts_per_batch=8"]
    for name in ("whole", "resumed"):
        commands.done([*given, f"evaluations_dir={tmp_path / name}"], log, script="evaluate")
        folder = the_evaluation(tmp_path / name / "arithmetic_tools")
        lines = folder.samples_file.read_bytes().splitlines(keepends=True)
        if name == "whole":
            shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
            cut = the_evaluation(tmp_path / "resumed" / "arithmetic_tools")
            cut.samples_file.write_bytes(b"".join(lines[:11]))
            cut.results_file.unlink()
    whole = the_evaluation(tmp_path / "whole" / "arithmetic_tools")
    assert_same_samples(folder, whole)
    drawn = rows(whole.samples_file)
    assert len(drawn) == 16 and any(row["tool_tokens"] > 0 for row in drawn)
    for row in drawn:
        assert row["ending"] in ("end", "length", "turns")
        assert row["own_tokens"] + row["tool_tokens"] <= 72
        assert ("<tool_response>" in row["response"]) == (row["tool_tokens"] > 0)
    assert "tool_tokens" not in rows(the_evaluation(tmp_path / "whole" / "arithmetic").samples_file)[0]


def planned(*overrides: str, processes: int = 1):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):  # in which `plan` composes each task
        return plan(compose("evaluate", overrides=list(overrides)), list(overrides), "arithmetic", processes)


def test_any_maths_set_is_evaluated_with_python_by_its_number_of_turns():
    plain, tools = planned("tasks=[aime24,amc23]"), planned("tasks=[aime24,amc23]", "++task.max_turns=3")
    assert [task.environment for task in plain.tasks.values()] == [None, None] and plain.sandbox is None
    assert [cfg.task.max_turns for cfg in tools.configurations.values()] == [3, 3]
    assert tools.sandbox is not None and "sandbox" in tools.identity("amc23")
    assert tools.folder_of_all("aime24") != plain.folder_of_all("aime24")


def test_a_run_with_python_is_evaluated_with_python_and_its_own_limits(tmp_path):
    recorded = composed("task=dapo_math_tools", "task.max_completion_length=2048")
    OmegaConf.save(recorded, tmp_path / "config.yaml", resolve=True)
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    sets = planned(f"run={tmp_path}", "tasks=[aime25,arithmetic]").configurations
    assert [cfg.task.max_completion_length for cfg in sets.values()] == [2048, 2048]
    assert sets["aime25"].task.max_turns == 5 and "max_turns" not in sets["arithmetic"].task
    typed = planned(f"run={tmp_path}", "tasks=[aime25]", "++task.max_turns=3", "++task.max_completion_length=512")
    assert (typed.configurations["aime25"].task.max_turns, typed.cfg.run) == (3, str(tmp_path))
    assert typed.configurations["aime25"].task.max_completion_length == 512


@pytest.fixture
def with_vllm(monkeypatch):
    """A machine with vLLM and one GPU, as far as the checks are concerned."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("experiments.running.devices.visible_gpus", lambda: ["0"])
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_one_vllm_serves_sets_with_python_or_without(with_vllm):
    for tasks in ("[gsm8k_tools,math_lvl3to5_tools]", "[aime24,amc23]"):
        planned(f"tasks={tasks}", "rollouts_by=vllm")
    with pytest.raises(RunError, match="with and without Python, and each kind needs its own vLLM.*one command"):
        planned("tasks=[gsm8k_tools,gsm8k]", "rollouts_by=vllm")


def test_a_set_with_python_is_refused_on_a_server_wherever_it_stands_among_the_tasks(with_vllm, monkeypatch):
    monkeypatch.setattr("experiments.evaluation.command.wait_for_server", lambda cfg: None)
    asked = ["tasks=[gsm8k,gsm8k_tools]", "rollouts_by=vllm_server"]
    with pytest.raises(RunError, match="rollouts_by=vllm_server with tools on 2 processes"):
        planned(*asked, processes=2)
    planned("tasks=[gsm8k_tools]", "rollouts_by=vllm_server", processes=1)


def test_training_rows_need_not_be_there_for_an_evaluation(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}")
    given = ["task=dapo_math", "++task.path=/nowhere", f"++task.evaluation.path={tmp_path}/rows.jsonl"]
    check_files(planned(*given))
    with pytest.raises(RunError, match="path='/elsewhere' does not exist"):
        check_files(planned(*given[:-1], "++task.evaluation.path=/elsewhere"))


# ---- refusals

REFUSED = {
    ("k=0",): ("k=0", "whole number >= 1", "Try k=1"),
    ("k=2.5",): ("k=2.5", "whole number >= 1"),
    ("rollouts_per_batch=0",): ("rollouts_per_batch=0", "Try rollouts_per_batch=1"),
    ("tasks=[aime24,math50]",): ("math50 is not a task", "Did you mean math500?", "Known: "),
    ("tasks=[]",): ("tasks=[]", "Try tasks=[math500]"),
    ("tasks=[aime24]", "task=math500"): ("tasks=['aime24'] and task=", "Leave one out"),
    ("task=gsm8k", "task.eval_split=null"): ("task gsm8k", "nothing to evaluate on", "tasks=[math500]"),
    ("task=gsm8",): ("task=gsm8", "not one of the choices", "Did you mean gsm8k?"),
    ("run=nowhere",): ("run=nowhere", "is not a folder", "Give a run directory"),
    ("run=conf",): ("run=conf", "has no run's config.yaml", "Give a run directory"),
    ("watch=true",): ("watch=true", "run is not set", "Add run=RUN"),
    ("watch=perhaps",): ("watch=perhaps", "true or false", "Try watch=false"),
    ("checkpoint=nowhere/step-1",): ("checkpoint=nowhere/step-1", "is not a folder", "Give RUN/checkpoints"),
    ("checkpoint=conf",): ("checkpoint=conf", "holds no *.safetensors"),
    ("run=conf", "checkpoint=conf"): ("run=conf", "checkpoint=conf", "Leave one out"),
    ("run=conf", "model=qwen2.5-7b"): ("model is set", "run=conf has its own model"),
    ("temperature=0",): ("temperature=0", "positive number"),
    ("trainer.top_p=0",): ("trainer.top_p=0", "(0, 1]", "Try trainer.top_p=1.0"),
    ("trainer.beta=0.1",): ("trainer.beta", "no key of trainer", "Keys: "),
    ("trainer.use_vllm=true",): ("trainer.use_vllm", "no key of trainer", "Keys: "),
    ("parallel=fsdp2",): ("parallel=fsdp2", "nothing is trained here", "rollouts_by.tensor_parallel"),
    ("rollouts_by.rows=8",): ("rollouts_by.rows=8", "Use rollouts_per_batch=8"),
    ("rollouts_by=vlm",): ("rollouts_by=vlm", "not one of the choices", "Did you mean vllm?"),
    ("baseline=otb",): ("baseline", "no key of this project"),
    ("model.name=/nowhere",): ("model.name=/nowhere", "is not a folder"),
    ("model.name=Qwen/Qwen2.5-7B",): ("would get the settings of model=tiny", "Use model=hub model.name=Qwen/Qwen2.5"),
    ("task=gsm8k", "task.path=/nowhere"): ("path='/nowhere'", "does not exist", "Check the spelling"),
    ("tasks=[arithmetic,aime24]",): ("path='HuggingFaceH4/aime_2024'", "not in the cache", "prefetch.py --dataset"),
    ("model=qwen2.5-7b",): ("model.name=Qwen/Qwen2.5-7B", "not in the cache", "prefetch.py --model Qwen/Qwen2.5-7B"),
    ("rollouts_by.sleep=true",): ("rollouts_by.sleep=true", "would ignore it", "Add rollouts_by=vllm"),
    ("task.eval_prompts=0",): ("task.eval_prompts=0", "must be 1 to 1024"),
}


@pytest.mark.parametrize("given", REFUSED, ids=" ".join)
def test_what_cannot_be_evaluated_is_refused_in_one_line(given, tmp_path, log):
    code, printed = commands.run([*given, f"evaluations_dir={tmp_path / 'found'}"], log, script="evaluate")
    assert code == 2 and printed.startswith("error: ") and printed.count("\n") == 1, printed
    for part in REFUSED[given]:
        assert part in printed
    assert not (tmp_path / "found").exists()


def test_a_run_without_checkpoints_is_refused_unless_it_is_watched(runs, tmp_path, log):
    (tmp_path / "run").mkdir()
    shutil.copy(runs["whole"].config_file, tmp_path / "run")
    code, printed = commands.run([f"run={tmp_path / 'run'}"], log, script="evaluate")
    assert code == 2 and "no complete checkpoint yet. Use watch=true" in printed


def test_refusals_come_within_two_seconds_of_the_processor(tmp_path):
    before = os.times()
    done = commands.run_command_line(["tasks=[math50]", f"evaluations_dir={tmp_path}"], script="evaluate")
    after = os.times()
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: ")
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2
