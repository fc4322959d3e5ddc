"""What a run is evaluated on while it trains: several sets, a row per sample, vLLM kept busy; rows checked once."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from analysis.evaluations import measures, read_run_samples
from experiments.running import data
from experiments.running.held_out import HeldOut
from experiments.running.held_out_sampler import HeldOutSampler, Samples
from experiments.running.run_trainer import RunCallback, RunTrainer
from otb import OTBTrainer
from otb.errors import RunError
from otb.records import RunDirectory
from tests.support import commands
from tests.support.commands import arguments, rows, the_run, without_times
from tests.support.trainers import PROMPTS, byte_reward, config, dataset


@pytest.fixture(scope="module")
def several(policy, tmp_path_factory):
    """A run that is evaluated on three sets, one of them from a folder; what it printed."""
    folder = tmp_path_factory.mktemp("several")
    (folder / "data" / "aime24").mkdir(parents=True)
    problems = [{"problem": f"{i}+1?", "answer": str(i + 1)} for i in range(4)]
    (folder / "data" / "aime24" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    sets = dict(evaluation__tasks="[arithmetic,aime24]", evaluation__max_rows=3, evaluation__data_dir=folder / "data")
    given = arguments(folder / "runs", model__name=policy, steps=2, **sets)
    printed = commands.done(given, folder / "log")
    return RunDirectory(the_run(folder / "runs")), printed


def test_a_run_on_several_sets_keeps_a_row_per_sample_that_adds_up_to_its_evaluations(several):
    directory, _ = several
    samples = read_run_samples(directory.path)
    assert list(samples.columns) == ["task", "problem", "sample", "reward", "ending", "own_tokens", "step"]
    evaluations = rows(directory.evaluations_file)
    assert [row["step"] for row in evaluations] == [0, 2] == sorted(samples.step.unique())
    for row in evaluations:
        here = samples[samples.step == row["step"]]
        assert here.task.drop_duplicates().tolist() == ["parity", "arithmetic", "aime24"]
        for task, problems in (("parity", 4), ("arithmetic", 3), ("aime24", 3)):
            pairs = here[here.task == task][["problem", "sample"]].to_numpy().tolist()
            assert pairs == [[problem, sample] for problem in range(problems) for sample in range(2)]
        own = here[here.task == "parity"]
        assert (own.reward == 1).mean() == row["accuracy"] and own.own_tokens.mean() == row["response_length_mean"]
    assert (samples.own_tokens[samples.ending == "length"] == 6).all() and {*samples.ending} <= {"end", "length"}
    graded = samples[samples.task == "aime24"]  # six tokens hold no box; by the reward of the run half would be right
    assert (graded.reward == 0).all() and samples[samples.task == "parity"].reward.sum() > 0
    table = measures(samples[(samples.task == "parity") & (samples.step == 2)], 2)
    assert table[table.measure == "avg_at_k"].estimate.item() == pytest.approx(evaluations[1]["accuracy"])


def test_further_sets_change_nothing_in_a_run(several, policy, tmp_path):
    directory, _ = several
    commands.done(arguments(tmp_path, model__name=policy, steps=2), tmp_path / "log")
    plain = RunDirectory(the_run(tmp_path))
    for name in ("metrics_file", "evaluations_file"):
        assert without_times(getattr(directory, name)) == without_times(getattr(plain, name))
    mine = read_run_samples(directory.path).query("task == 'parity'").reset_index(drop=True)
    pd.testing.assert_frame_equal(mine, read_run_samples(plain.path))


def test_sets_are_accounted_for_and_their_peaks_stand_beside_their_ends(several):
    directory, printed = several
    found = json.loads(directory.environment_file.read_text())["data"]
    assert list(found) == ["train", "eval", "arithmetic", "aime24"] and found["arithmetic"]["rows"] == 3
    assert found["aime24"]["path"].endswith("data/aime24") and list(found["aime24"]["sha256"]) == ["test.jsonl"]
    for text in ("step 2: aime24 accuracy", "final (step)", "peak (step)", "too high", "best: the largest"):
        assert text in printed


# ---- batches, and what TRL need not do


class Trainer:
    """The part of a trainer that a HeldOutSampler uses; it records the rows that it was given."""

    def __init__(self, use_vllm: bool, rank: int):
        self.given, self.model = [], None
        self.accelerator = SimpleNamespace(num_processes=2, process_index=rank, gather=lambda mine: mine.repeat(2, 1))
        self.args = SimpleNamespace(use_vllm=use_vllm, per_device_eval_batch_size=8, seed=0)

    def _generate_and_score_completions(self, inputs):
        self.given.append([row["number"] for row in inputs])
        self.sampled_tokens = torch.tensor([[row["number"], row["number"] + 1] for row in inputs])
        self.endings = ["end"] * len(inputs)

    def summed_rewards(self):
        return torch.ones(2 * len(self.given[-1]))


def sampled(trainer, problems):
    """Four samples of each problem; a trainer that only records has no options to change for it."""
    sampler = HeldOutSampler(trainer)
    sampler.evaluating = lambda reward, samples: nullcontext()
    return sampler.samples(problems, 4)


def test_vllm_gets_all_prompts_of_a_process_in_one_call_and_generate_as_many_as_fit_its_batch():
    problems = HeldOut("numbers", [{"number": number} for number in range(7)], reward=None)
    four = [number for number in range(4) for _ in range(4)]
    by_vllm = [Trainer(use_vllm=True, rank=rank) for rank in (0, 1)]
    samples = [sampled(trainer, problems) for trainer in by_vllm]
    assert by_vllm[0].given == [four]
    assert by_vllm[1].given == [[number for number in (4, 5, 6, 0) for _ in range(4)]]  # filled up: whole groups
    assert [one.rewards.shape for one in samples] == [(7, 4)] * 2 and (samples[0].own_tokens[3] == 3).all()
    by_generate = Trainer(use_vllm=False, rank=0)
    sampled(by_generate, problems)  # batches of 8 samples: two prompts a process
    assert by_generate.given == [four[:8], [4] * 4 + [5] * 4]


def test_an_evaluation_makes_no_forward_that_only_the_loss_reads(tmp_path, untrained, tokenizer, monkeypatch):
    """TRL would make two with beta and num_iterations; its options are afterwards what they were."""
    options = dict(beta=0.1, num_iterations=2, per_device_eval_batch_size=4)
    trainer = OTBTrainer(untrained, byte_reward, config(tmp_path, **options), dataset(), processing_class=tokenizer)
    passes = []
    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: passes.append(1))
    names = ("beta", "num_iterations", "vllm_importance_sampling_correction", "num_generations_eval", "reward_funcs")
    before = [getattr(trainer, name) for name in names]
    trainer.model.train()
    with HeldOutSampler(trainer).evaluating(lambda completions, **_: [0.5] * len(completions), samples=2):
        trainer._generate_and_score_completions([{"prompt": PROMPTS[0]} for _ in range(2)])
        assert trainer._rewards_per_function.tolist() == [[0.5], [0.5]] and not trainer.model.training
    assert passes == [] and trainer.model.training
    assert [getattr(trainer, name) for name in names] == before == [0.1, 2, True, 4, [byte_reward]]


def test_weights_of_the_training_reward_do_not_touch_an_evaluation(tmp_path, untrained, tokenizer):
    options = dict(reward_weights=[0.25], per_device_eval_batch_size=4)
    trainer = OTBTrainer(untrained, byte_reward, config(tmp_path, **options), dataset(), processing_class=tokenizer)
    with HeldOutSampler(trainer).evaluating(lambda completions, **_: [0.5] * len(completions), samples=2):
        trainer._generate_and_score_completions([{"prompt": PROMPTS[0]} for _ in range(2)])
        assert trainer.summed_rewards().tolist() == [0.5, 0.5]
    assert trainer.reward_weights.tolist() == [0.25]


def test_samples_with_tools_count_both_kinds_of_tokens():
    column = torch.tensor([[1, 2], [3, 4]])
    samples = Samples(torch.tensor([[1.0, 0.0], [torch.nan, 0.0]]), column, column + 2, torch.tensor([[0, 1], [2, 0]]))
    table = samples.table("maths", with_tools=True)
    assert table.tool_tokens.tolist() == [2, 2, 2, 2] and table.ending.tolist() == ["end", "length", "turns", "end"]
    assert table.reward.isna().tolist() == [False, False, True, False]
    assert "tool_tokens" not in samples.table("maths", with_tools=False)


def test_prompts_without_a_scored_sample_count_neither_as_right_nor_as_wrong():
    nan = torch.nan
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=3), _totals={"own_tokens_total": 0})
    column = torch.ones(3, 2)
    for rewards, right, solved, unscored in (
        ([[1.0, 0.0], [nan, nan], [0.0, nan]], 1 / 3, 1 / 2, 1 / 2),
        ([[nan, nan]] * 3, None, None, 1.0),
    ):
        row = RunTrainer._evaluation_row(trainer, Samples(torch.tensor(rewards), column, column, column), 0.0)
        found = [row.get(name) for name in ("accuracy", "pass_at_k", "unscored")]
        assert found == pytest.approx([right, solved, unscored])


# ---- rows are checked by the first process


def of_process(monkeypatch, rank: int, told: list | None = None) -> list:
    """Makes this process one of two; `told` is what the first one broadcasts. Returns what this one broadcasts."""
    sent: list = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr("accelerate.utils.broadcast_object_list", lambda mine: sent.extend(mine) or told or mine)
    return sent


def test_the_first_process_works_and_tells_the_others(monkeypatch):
    sent = of_process(monkeypatch, rank=0)
    assert data.told_by_the_first(lambda: 7) == 7 and sent == [7, None]
    of_process(monkeypatch, rank=1, told=[7, None])
    assert data.told_by_the_first(lambda: pytest.fail("the others do nothing")) == 7


def test_what_the_first_process_refuses_all_refuse(monkeypatch):
    def refuse():
        raise RunError("3 prompts are too long")

    sent = of_process(monkeypatch, rank=0)
    with pytest.raises(RunError, match="3 prompts"):
        data.told_by_the_first(refuse)
    assert sent == [None, "3 prompts are too long"]
    of_process(monkeypatch, rank=1, told=sent)
    with pytest.raises(RunError, match="3 prompts"):
        data.told_by_the_first(lambda: pytest.fail("the others do nothing"))


@pytest.mark.parametrize("measured", [True, False])
def test_whether_to_evaluate_before_the_first_step_is_what_the_first_process_sees(measured, monkeypatch, tmp_path):
    """The second one would find the opposite in the file."""
    directory, evaluated = RunDirectory(tmp_path), []
    if not measured:
        directory.append(directory.evaluations_file, {"step": 0})
    of_process(monkeypatch, rank=1, told=[measured, None])
    trainer = SimpleNamespace(directory=directory, evaluate_held_out=lambda: evaluated.append(1))
    RunCallback(trainer).on_train_begin()
    assert bool(evaluated) is not measured
