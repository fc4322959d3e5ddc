"""Tests maths tasks: row formats, prompts, splits, errors before a model loads, rewards, provenance, prefetching."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from datasets.load import CachedDatasetModuleFactory
from datasets.naming import camelcase_to_snakecase
from huggingface_hub.file_download import repo_folder_name
from hydra.utils import instantiate

from experiments.prefetch import main
from otb.tasks.columns import prompt_messages, reference
from otb.tasks.duplicates import first_of_equal
from otb.tasks.loading import refuse_absent
from otb.tasks.maths import BOXED, Maths, last_assistant_text
from otb.tasks.sources import Source
from tests.support.commands import ROOT
from tests.support.recipes import composed
from tests.support.waiting import PATIENCE_SECONDS

TASKS = ["gsm8k", "math500", "aime24", "aime25", "amc23", "math_lvl3to5", "dapo_math"]
TASKS += ["dpao_filter", "dpao_aime24", "dpao_aime25"]

GSM8K = [
    {"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 4"},
    {"question": "Big?", "answer": "#### 1,200"},
    {"question": "Debt?", "answer": "#### -5"},
]
VERL = [{"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2", "style": "rule"}}]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """Keeps data sets that a test prepares in the test's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_jsonl(file: Path, rows: list[dict]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def gsm8k_folder(folder: Path, rows: list[dict] = GSM8K) -> Path:
    write_jsonl(folder / "train.jsonl", rows)
    write_jsonl(folder / "test.jsonl", rows[:1])
    return folder


def task(path, **arguments) -> Maths:
    """Returns a GSM8K-like task with some arguments replaced."""
    usual = dict(
        name="little",
        question_column="question",
        answer_column="answer",
        answer_after="####",
        max_completion_length=64,
        train_split="train",
        eval_split="test",
    )
    return Maths(path=str(path), **(usual | arguments))


def test_rows_of_gsm8k_become_prompts_and_answers(tmp_path):
    little = task(gsm8k_folder(tmp_path))
    rows = little.train_dataset()
    assert rows.column_names == ["prompt", "answer"]
    assert rows["answer"][:] == ["4", "1,200", "-5"]
    assert rows[0]["prompt"] == [{"role": "user", "content": f"Two and two?\n\n{BOXED}"}]
    assert len(little.eval_dataset()) == 1


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet", "saved"])
def test_rows_are_the_same_in_every_file_format(tmp_path, suffix):
    rows = Dataset.from_list(GSM8K)
    folder = tmp_path / "rows"
    folder.mkdir()
    if suffix == "saved":
        DatasetDict(train=rows, test=rows).save_to_disk(folder)
    elif suffix == "csv":
        rows.to_csv(folder / "train.csv")
    elif suffix == "parquet":
        rows.to_parquet(folder / "train-00000-of-00001.parquet")
    else:
        rows.to_json(folder / f"train.{suffix}", lines=suffix == "jsonl")
    written = sorted(folder.rglob("*"))
    little = task(folder, eval_split=None)
    assert little.train_dataset()["answer"][:] == ["4", "1,200", "-5"]
    assert sorted(folder.rglob("*")) == written  # the folder may be read-only
    same = task(write_jsonl(tmp_path / "same.jsonl", GSM8K), eval_split=None)
    key = "prompts_and_answers_sha256"
    assert little.provenance()["train"][key] == same.provenance()["train"][key]


def test_rows_in_verls_format_keep_their_messages(tmp_path):
    columns = dict(question_column="prompt", answer_column="reward_model.ground_truth", answer_after=None)
    path = write_jsonl(tmp_path / "rows.jsonl", VERL)
    row = task(path, eval_split=None, instruction=None, **columns).train_dataset()[0]
    assert row == {"prompt": VERL[0]["prompt"], "answer": "2"}


def test_prompts_take_a_system_message_and_an_instruction_once():
    messages = prompt_messages([{"role": "user", "content": "1+1?"}], "Be brief.", "Box it.")
    assert [message["content"] for message in messages] == ["Be brief.", "1+1?\n\nBox it."]
    assert prompt_messages(messages, "Be long.", "Box it.") == messages


@pytest.mark.parametrize(
    ("cell", "mark", "answer"),
    [
        ("5", None, "5"),
        (27.0, None, "27"),
        (2.5, None, "2.5"),
        (7, None, "7"),
        (None, None, ""),
        (float("nan"), None, ""),
        ("  ", None, ""),
        ("a #### b #### 3 ", "####", "3"),
        ("no mark", "####", ""),
        ("\\boxed{\\frac{1}{2}}", None, "\\frac{1}{2}"),
    ],
)
def test_reference_is_a_string_or_empty(cell, mark, answer):
    assert reference(cell, mark) == answer


def test_max_eval_rows_takes_the_first_rows(tmp_path):
    write_jsonl(tmp_path / "test.jsonl", GSM8K)
    little = task(tmp_path, train_split=None, max_eval_rows=2)
    assert little.eval_dataset()["answer"][:] == ["4", "1,200"]


def test_evaluation_rows_may_come_from_another_task(tmp_path):
    other = task(gsm8k_folder(tmp_path / "other"), name="other", train_split=None)
    path = write_jsonl(tmp_path / "rows.jsonl", GSM8K)
    little = task(path, eval_split=None, evaluation=other)
    assert (len(little.train_dataset()), len(little.eval_dataset())) == (3, 1)
    found = little.provenance()
    assert (found["train"]["rows"], found["eval"]["path"]) == (3, str(tmp_path / "other"))


def test_provenance_hashes_the_files_that_were_read(tmp_path):
    found = task(gsm8k_folder(tmp_path)).provenance()
    for part, split in (("train", "train"), ("eval", "test")):
        content = (tmp_path / f"{split}.jsonl").read_bytes()
        assert found[part]["sha256"] == {f"{split}.jsonl": hashlib.sha256(content).hexdigest()}
    json.dumps(found)


def test_rewards_come_from_the_last_assistant_message_alone(tmp_path):
    little = task(gsm8k_folder(tmp_path))
    own = [{"role": "assistant", "content": "It is \\boxed{4}."}]
    tool = [
        {"role": "assistant", "content": "\\boxed{5}"},
        {"role": "tool", "content": "\\boxed{4}"},
        {"role": "assistant", "content": "\\boxed{6}"},
        {"role": "tool", "content": "\\boxed{4}"},
    ]
    only_calls = [{"role": "assistant", "content": None, "tool_calls": []}]
    logged = {}
    rewards = little.reward([own, tool, only_calls, []], answer=["4"] * 4, log_metric=logged.__setitem__, level=[1] * 4)
    assert rewards == [1.0, 0.0, 0.0, 0.0]
    # one correct, one wrong, two without an answer
    assert logged == {
        "grades/correct": 0.25,
        "grades/wrong": 0.25,
        "grades/unparsable": 0.5,
        "grades/grader_timeout": 0.0,
        "grades/grader_error": 0.0,
    }
    assert last_assistant_text(tool) == "\\boxed{6}"
    assert little.reward([own], answer=["\\text{(E)},"]) == [None]


REFUSED = {  # case: (makes the task in a folder that has gsm8k/, what its refusal says)
    "missing path": (lambda folder, good: task(folder / "gsm9k"), ["gsm9k", "does not exist", "gsm8k", "Did you mean"]),
    "no near miss": (lambda folder, good: task(folder / "zzz" / "deep"), ["zzz", "does not exist", "hub id"]),
    "no data files": (
        lambda folder, good: task(folder / "empty"),
        ["folder without data files", "nothing", ".jsonl"],
    ),
    "empty file": (lambda folder, good: one_file(folder, "a.jsonl", ""), ["a.jsonl", "at least one row"]),
    "no rows": (lambda folder, good: one_file(folder, "a.csv", "question,answer\n"), ["a.csv", "no row", "as csv"]),
    "half a file": (
        lambda folder, good: one_file(folder, "a.jsonl", '{"question": "a", "ans'),
        ["a.jsonl", "no row that can be read as json", "complete"],
    ),
    "unknown suffix": (lambda folder, good: one_file(folder, "notes.md", "text"), [".md", ".parquet"]),
    "missing split": (lambda folder, good: task(good, train_split="training"), ["no split 'training'", "test, train"]),
    "several splits": (
        lambda folder, good: task(good, train_split="only", eval_split=None),
        ["several splits", "test, train"],
    ),
    "missing column": (
        lambda folder, good: task(good, question_column="problem"),
        ["'problem'", "answer, question", "task.question_column"],
    ),
    "missing nested column": (
        lambda folder, good: verl(folder, VERL, answer_column="reward_model.answer"),
        ["reward_model.answer", "reward_model.ground_truth"],
    ),
    "unanswered rows": (
        lambda folder, good: of_rows(folder, [*GSM8K, {"question": "What?", "answer": ""}, UNMARKED]),
        ["2 of 5 rows", "row 3", "task.drop_unanswered=true"],
    ),
    "no answer at all": (
        lambda folder, good: task(good, answer_after="Answer:", drop_unanswered=True),
        ["None of the 3 rows", "Answer:"],
    ),
    "answer of a wrong type": (
        lambda folder, good: of_rows(folder, [{"question": "a", "answer": ["1", "2"]}]),
        ["list", "string or a number"],
    ),
    "prompt that ends with the assistant": (
        lambda folder, good: verl(folder, [{"prompt": [{"role": "assistant", "content": "Hm"}], "answer": "1"}]),
        ["'assistant'", "user's"],
    ),
    "no training rows": (lambda folder, good: task(good, train_split=None), ["train_split=null", "evaluation"]),
    "no path": (
        lambda folder, good: Maths("little", None, "question", "answer", 64),
        ["path=null", "task.path=FOLDER"],
    ),
    "zero rows": (lambda folder, good: task(good, max_eval_rows=0), ["max_eval_rows=0", "Try"]),
    "same split": (lambda folder, good: task(good, eval_split="train"), ["training rows", "train_split=null"]),
    "two evaluations": (
        lambda folder, good: task(good, evaluation=task(good)),
        ["one of them", "task.eval_split=null"],
    ),
    "hub id not cached": (
        lambda folder, good: task("some-org/some-set", config="main", revision="v2"),
        ["experiments/prefetch.py --dataset some-org/some-set --config main --revision v2", "HF_HUB_OFFLINE"],
    ),
}
UNMARKED = {"question": "Why?", "answer": "no mark"}


def one_file(folder: Path, name: str, text: str) -> Maths:
    (folder / name).write_text(text)
    return task(folder / name, eval_split=None)


def of_rows(folder: Path, rows: list[dict], **arguments) -> Maths:
    return task(write_jsonl(folder / "rows.jsonl", rows), eval_split=None, **arguments)


def verl(folder: Path, rows: list[dict], **arguments) -> Maths:
    return of_rows(folder, rows, question_column="prompt", answer_after=None, **arguments)


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_with_value_rule_and_fix(tmp_path, monkeypatch, case):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    make, words = REFUSED[case]
    with pytest.raises(ValueError) as refused:
        make(tmp_path, gsm8k_folder(tmp_path / "gsm8k")).train_dataset()
    message = str(refused.value)
    assert all(word in message for word in words), message
    assert len(message) < 700 and "\n" not in message


def test_unanswered_rows_are_dropped_by_choice(tmp_path):
    rows = [*GSM8K, {"question": "What?", "answer": ""}, {"question": " ", "answer": "#### 3"}]
    little = task(write_jsonl(tmp_path / "rows.jsonl", rows), eval_split=None, drop_unanswered=True)
    assert len(little.train_dataset()) == 3


def test_evaluation_on_the_file_that_is_trained_on_is_refused(tmp_path):
    little = task(write_jsonl(tmp_path / "rows.jsonl", GSM8K))
    assert len(little.train_dataset()) == 3
    with pytest.raises(ValueError, match="evaluated on its training rows"):
        little.eval_dataset()
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        task(tmp_path / "rows.jsonl", eval_split=None).eval_dataset()


# ---- rows of equal prompt and answer


def test_repeated_rows_are_one_row_the_first_of_them(tmp_path):
    """The last row equals the first except for blanks; the same question with another answer is kept."""
    again = {"question": " Two and two?", "answer": "#### 4"}
    other = {"question": "Two and two?", "answer": "#### four"}
    path = write_jsonl(tmp_path / "rows.jsonl", [*GSM8K, GSM8K[1], other, GSM8K[1], again])
    little = task(path, eval_split=None, unique=True)
    assert little.train_dataset()["answer"][:] == ["4", "1,200", "-5", "four"]
    assert little.provenance()["train"]["repeated_rows_dropped"] == 3
    all_rows = task(path, eval_split=None)
    assert len(all_rows.train_dataset()) == 7 and "repeated_rows_dropped" not in all_rows.provenance()["train"]


def test_first_rows_of_any_columns_are_those_of_a_naive_loop():
    """Rows have chats of different lengths, missing cells at every level, and numbers; tables have several chunks."""
    draw = random.Random(3)

    def cell(depth: int):
        kind = draw.choice(["missing", "list", "list"])
        if depth == 0 or kind == "missing":
            return None if kind == "missing" else {"role": draw.choice("ab"), "n": draw.choice([None, 1, 2])}
        return [cell(depth - 1) for _ in range(draw.randrange(3))]

    message = pa.struct([("role", pa.string()), ("n", pa.int64())])
    rows = [(cell(1), draw.choice(["x", "y", None])) for _ in range(400)]
    parts = [rows[:150], rows[150:150], rows[150:]]
    chats = pa.chunked_array([[chat for chat, _ in part] for part in parts], pa.list_(message))
    answers = pa.chunked_array([[answer for _, answer in part] for part in parts], pa.string())
    seen, first = set(), []
    for place, row in enumerate(rows):
        if repr(row) not in seen:
            first.append(place)
        seen.add(repr(row))
    assert 20 < len(first) < 380
    assert first_of_equal([chats, answers]).tolist() == first


# ---- sets whose file names do not show their splits


def dpao_folder(folder: Path) -> Path:
    """Returns a folder like DPAO_filter: parts that differ in an unused column, and two test files."""

    def write(name: str, questions: list[str], side: list) -> None:
        rows = {
            "data_source": ["math_dapo"] * len(questions),
            "prompt": [[{"role": "user", "content": question}] for question in questions],
            "reward_model": [{"ground_truth": str(len(question)), "style": "rule"} for question in questions],
            "extra_info": side,
        }
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(rows), folder / name)

    write("train/part-0.parquet", ["a", "bb"], [{"index": "7"}, {"index": "8"}])
    write("train/part-1.parquet", ["ccc", "bb"], [{"index": 1, "split": "train"}, {"index": 2, "split": "train"}])
    for year, question in (("24", "dddd"), ("25", "eeeee")):
        write(f"test/aime{year}.parquet", [question], [{"index": 1}])
    return folder


def test_files_that_disagree_in_side_columns_are_read_and_test_files_are_told_apart(tmp_path):
    folder = dpao_folder(tmp_path / "dpao")
    paths = [f"task.path={folder}", f"task.evaluation.path={folder}"]
    for overrides, evaluated in (([], "4"), (["task@task.evaluation=dpao_aime25"], "5")):
        dpao = instantiate(composed("+task=dpao_filter", *paths, *overrides, command=None).task)
        assert dpao.train_dataset()["answer"][:] == ["1", "2", "3"]
        assert dpao.eval_dataset()["answer"][:] == [evaluated]
    found = dpao.provenance()
    assert list(found["train"]["sha256"]) == ["train/part-0.parquet", "train/part-1.parquet"]
    assert found["train"]["repeated_rows_dropped"] == 1 and list(found["eval"]["sha256"]) == ["test/aime25.parquet"]


def test_files_of_a_hub_id_are_fetched_alone_and_their_commit_is_kept(tmp_path, monkeypatch):
    commit, asked = "0123456789" * 4, []
    snapshot = dpao_folder(tmp_path / commit)

    def snapshot_download(hub_id, **options):
        asked.append((hub_id, options))
        if options["revision"] == "nowhere":
            raise FileNotFoundError("not cached")
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    arguments = dict(question_column="prompt", answer_column="reward_model.ground_truth", answer_after=None)
    arguments |= dict(train_split=None, eval_split="only", files="test/aime24.parquet")
    dpao = task("some-org/some-set", **arguments, revision="v1")
    assert dpao.eval_dataset()["answer"][:] == ["4"]
    options = {"repo_type": "dataset", "revision": "v1", "allow_patterns": ["test/aime24.parquet"]}
    assert asked[0] == ("some-org/some-set", options)
    found = dpao.provenance()["eval"]
    assert (found["commit"], found["revision"], list(found["sha256"])) == (commit, "v1", ["test/aime24.parquet"])
    with pytest.raises(ValueError, match="--revision nowhere --files test/aime24.parquet.*task.revision=null"):
        task("some-org/some-set", **arguments, revision="nowhere").eval_dataset()
    with pytest.raises(ValueError, match=r"no data files .* that match files='test/\*.csv'.*correct task.files"):
        task("some-org/some-set", **(arguments | {"files": "test/*.csv"})).eval_dataset()
    with pytest.raises(ValueError, match="which form one split.*Try task.eval_split=null"):
        task("some-org/some-set", files="train/*")


def test_a_path_that_exists_wins_over_a_hub_id_and_a_misspelt_relative_path_is_no_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gsm8k_folder(tmp_path / "data" / "gsm8k")
    assert Source("data/gsm8k", "train").local == Path("data/gsm8k")
    assert Source("openai/gsm8k", "train").local is None
    with pytest.raises(ValueError, match="Did you mean .*gsm8k"):
        _ = Source("data/gsm9k", "train").local


@pytest.mark.parametrize("hub_id", ["someone/MySet-17k_Processed", "MATH-500"])
def test_offline_a_hub_id_is_absent_until_datasets_has_prepared_it(hub_id, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    (tmp_path / "someone___other").mkdir()
    with pytest.raises(ValueError, match=f"--dataset {hub_id}`"):
        refuse_absent(Source(hub_id, "train"))
    refuse_absent(Source(hub_id, "train"), offline=False)
    owner, _, name = hub_id.rpartition("/")
    folder = "___".join(filter(None, [owner, camelcase_to_snakecase(name)]))
    (tmp_path / folder / "default" / "0.0.0" / "1a2b").mkdir(parents=True)
    refuse_absent(Source(hub_id, "train"))
    assert CachedDatasetModuleFactory(hub_id, cache_dir=str(tmp_path)).get_module()  # where `datasets` itself looks


def test_offline_files_of_a_hub_id_are_absent_until_they_are_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    source = Source("someone/some-set", "only", files="train/*")
    with pytest.raises(ValueError, match="--dataset someone/some-set --files train"):
        refuse_absent(source)
    (tmp_path / repo_folder_name(repo_id=source.path, repo_type="dataset") / "snapshots" / "1a2b").mkdir(parents=True)
    refuse_absent(source)


def test_local_rows_never_touch_the_network(tmp_path):
    gsm8k_folder(tmp_path / "gsm8k")
    code = (
        "import socket, sys\n"
        "def refuse(*arguments, **_): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse\n"
        "from otb.tasks.maths import Maths\n"
        "task = Maths('t', sys.argv[1], 'question', 'answer', 9, 'train', 'test', answer_after='####')\n"
        "assert len(task.train_dataset()) == 3 and len(task.eval_dataset()) == 1 and task.provenance()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment["HF_HOME"] = str(tmp_path / "home")
    subprocess.run(
        [sys.executable, "-c", code, tmp_path / "gsm8k"],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=PATIENCE_SECONDS,
    )


@pytest.mark.parametrize("name", TASKS)
def test_every_task_file_names_only_arguments_that_exist(name):
    keys = ["task.path=elsewhere/set", "task.revision=v1", "task.max_eval_rows=8", "task.drop_unanswered=true"]
    built = instantiate(composed(f"+task={name}", *keys, command=None).task)
    assert (built.name, built.path, built.environment) == (name, "elsewhere/set", None)
    assert built.evaluation is None or built.evaluation.eval_split == "only"


def test_the_evaluation_task_is_chosen_on_the_command_line():
    assert composed("+task=dapo_math", command=None).task.evaluation.name == "aime24"
    assert composed("+task=dapo_math", "task@task.evaluation=math500", command=None).task.evaluation.name == "math500"


@pytest.mark.parametrize(
    ("name", "evaluation", "train_rows", "eval_rows"),
    [
        ("gsm8k", None, 7473, 1319),
        ("math500", None, None, 500),
        ("aime24", None, None, 30),
        ("aime25", None, None, 30),
        ("amc23", None, None, 40),
        ("math_lvl3to5", "math500", 8521, 500),  # 8,523 rows, of which two have an empty answer
    ],
)
def test_real_rows_load_through_the_shipped_task_files(name, evaluation, train_rows, eval_rows):
    shared = os.environ.get("OTB_SHARED")
    if not shared:
        pytest.skip("OTB_SHARED is not set: the folder whose data/ holds gsm8k, math500, aime24, ...")
    paths = [f"task.path={shared}/data/{name}"]
    paths += [f"task.evaluation.path={shared}/data/{evaluation}"] if evaluation else []
    real = instantiate(composed(f"+task={name}", *paths, command=None).task)
    rows = real.eval_dataset()
    assert len(rows) == eval_rows
    if train_rows:
        assert len(real.train_dataset()) == train_rows
    answers = rows["answer"][:]
    assert all(isinstance(answer, str) and answer for answer in answers)
    completions = [[{"role": "assistant", "content": f"\\boxed{{{answer}}}"}] for answer in answers]
    assert real.reward(completions, answer=answers) == [1.0] * eval_rows


@pytest.fixture
def hub(monkeypatch):
    """Returns a list of everything fetched from a fake hub, which has nothing named `absent/...`."""
    import datasets

    fetched = []

    def load_dataset(hub_id, config, revision):
        fetched.append(("dataset", hub_id, config, revision))
        return {"train": [1, 2, 3]}

    def snapshot_download(hub_id, revision, allow_patterns):
        if hub_id.startswith("absent/"):
            raise ConnectionError("Couldn't reach the hub\nlong trace")
        fetched.append(("model", hub_id, revision))
        return "/cache/model"

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return fetched


def test_prefetch_downloads_data_set_and_model(hub, capsys):
    assert main(["--dataset", "openai/gsm8k", "--config", "main", "--model", "a/b", "--model-revision", "v1"]) == 0
    assert hub == [("dataset", "openai/gsm8k", "main", None), ("model", "a/b", "v1")]
    assert "train 3 rows" in capsys.readouterr().out
    assert main(["--dataset", "openai/gsm8k", "--revision", "v2"]) == 0
    assert hub[-1] == ("dataset", "openai/gsm8k", None, "v2")


def test_prefetch_fetches_all_that_a_task_reads(hub, tmp_path, monkeypatch, capsys):
    snapshot, files = dpao_folder(tmp_path / "snapshot"), []
    (snapshot / "test" / "aime24.parquet").unlink()
    monkeypatch.setattr("otb.tasks.loading._fetched_files", lambda source: files.append(source) or snapshot)
    assert main(["--task", "gsm8k_tools", "dpao_filter", "math500", "arithmetic"]) == 1
    math500 = ("dataset", "HuggingFaceH4/MATH-500", None, "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be")
    assert hub == [("dataset", "openai/gsm8k", "main", "740312add88f781978c0658806c59bc2815b9866"), math500]
    assert [(source.path, source.files) for source in files] == [
        ("Jiawei415/DPAO_filter", "train/*"),
        ("Jiawei415/DPAO_filter", "test/aime24.parquet"),
    ]
    printed = capsys.readouterr()
    assert "DPAO_filter: train/part-0.parquet, train/part-1.parquet\n" in printed.out
    assert "no data files" in printed.err and "match files='test/aime24.parquet'" in printed.err


def test_prefetch_reports_what_it_could_not_fetch_and_goes_on(hub, capsys):
    assert main(["--model", "absent/model", "--dataset", "openai/gsm8k"]) == 1
    assert [kind for kind, *_ in hub] == ["dataset"]
    message = capsys.readouterr().err
    assert "absent/model could not be fetched (ConnectionError: Couldn't reach the hub)" in message
    assert "HF_ENDPOINT" in message and "long trace" not in message


def test_prefetch_is_refused_offline(hub, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["--model", "a/b"]) == 1
    assert hub == [] and "HF_HUB_OFFLINE=0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ([], "Give --task NAME, --dataset ID or --model ID"),
        (["--model", "a/b", "--config", "main"], "Also give --dataset ID"),
        (["--model", "a/b", "--files", "train/*"], "Also give --dataset ID"),
        (["--task", "math50"], "Did you mean math500?"),
        (["--model", "a/b", "--dataset", "c/d", "--revision", "v1"], "--model-revision"),
    ],
)
def test_prefetch_refuses_arguments_that_do_not_fit(arguments, fix, capsys):
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2 and fix in capsys.readouterr().err
