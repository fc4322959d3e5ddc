"""Names of run directories: what is typed is what is seen, no two commands share one, and docs/runs.md is true."""

import json
import re

import pytest
from omegaconf import OmegaConf

from experiments.running.command_line import accept_open_keys, quoted
from experiments.running.identity import difference, run_path, weights_digest
from otb import errors
from otb.errors import RunError
from otb.records.config_keys import WHERE_AND_HOW
from tests.support.commands import ROOT

CHOICES = {"task": "arithmetic", "model": "tiny", "baseline": "otb"}


def path(runs_dir, *overrides: str):
    cfg = OmegaConf.create({"runs_dir": str(runs_dir), "group_size": 4, "seed": 0})
    return run_path(cfg, list(overrides), CHOICES)


def name(*overrides: str) -> str:
    return path("runs", *overrides).name


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "otb-n4-seed0"),
        (["log_energy=True"], "otb-n4-seed0-log_energy=True"),
        (["baseline=otb", "group_size=4", "seed=0", "task=arithmetic", "model=tiny"], "otb-n4-seed0"),
        (["steps=500", "runs_dir=x", "rollouts.every=5", "trainer.report_to=wandb"], "otb-n4-seed0"),
        (["learning_rate=1e-3", "++baseline.tail=carry"], "otb-n4-seed0-baseline.tail=carry-learning_rate=1e-3"),
        (["experiment=stability"], "otb-n4-seed0-experiment=stability"),
        (["task@task.evaluation=aime25"], "otb-n4-seed0-task_task.evaluation=aime25"),
        (["task._target_=tests.support.Parity"], "otb-n4-seed0-task._target_=tests.support.Parity"),
    ],
)  # fmt: skip
def test_a_short_name_is_what_was_typed_and_stays_what_it_was(overrides, expected):
    assert name(*overrides) == expected
    assert path("runs", *overrides).parts[:2] == ("runs", "arithmetic-tiny")


def test_a_folder_or_hub_id_is_shown_by_its_last_part_with_a_digest_of_all_of_it():
    local = name("model.name=/home/someone/models/SmolLM2-135M", "model.rollouts_per_forward=4")
    shown, digest = local.rsplit("-", 1)
    assert shown == "otb-n4-seed0-model.name=SmolLM2-135M-model.rollouts_per_forward=4"
    assert len(digest) == 8 and int(digest, 16) >= 0
    assert name("model.name=Qwen/Qwen2.5-0.5B").startswith("otb-n4-seed0-model.name=Qwen2.5-0.5B-")
    assert name("model.name='/models/a b/'").startswith("otb-n4-seed0-model.name=a_b-")


def test_a_long_name_keeps_whole_pairs_and_cuts_long_values():
    overrides = [f"task.system_prompt={'word_' * 40}", "task.train_prompts=10", "trainer.beta=0.1"]
    overrides += [f"trainer.option_number_{i}=0.123456789" for i in range(9)]
    long = name(*overrides)
    assert len(long) <= len("otb-n4-seed0") + 120
    pairs = long.removeprefix("otb-n4-seed0-").rsplit("-", 1)[0].split("-")
    assert pairs[:2] == ["task.system_prompt=word_word_word_word_word_word_wo", "task.train_prompts=10"]
    assert all(pair in [pairs[0], *overrides] for pair in pairs)  # none is cut in its middle


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["task.path=/a/data"], ["task.path=/b/data"]),
        (["task.path=/a/b"], ["task.path=_a_b"]),
        (["model.lora.target_modules=[q,v]"], ["model.lora.target_modules=_q,v"]),
        (["task.system_prompt=" + "x" * 200], ["task.system_prompt=" + "x" * 201]),
        (["a=1", "b=2"], ["a=1-b=2"]),
        (["a=1", "~b"], ["a=1-b"]),
        ([f"key_number_{i}=1" for i in range(20)], [f"key_number_{i}=1" for i in range(21)]),
        (["model.name=x/y"], ["model.name=z/y"]),
    ],
)
def test_different_overrides_never_share_a_name(one, other):
    assert name(*one) != name(*other)


def test_a_name_does_not_depend_on_the_order_of_the_overrides():
    overrides = ["task.path=/data/gsm8k", "learning_rate=1e-3", "trainer.beta=0.1"]
    assert name(*overrides) == name(*reversed(overrides))


def test_configurations_differ_in_what_identifies_a_run_and_in_nothing_else():
    old = {"steps": 80, "seed": 0, "model": {"name": "tiny", "lora": {}}, "rollouts": {"every": 20}}
    assert difference(old, {**old, "steps": 500, "rollouts": {"every": 1}, "runs_dir": "elsewhere"}) == []
    new = {**old, "seed": 1, "model": {"name": "tiny", "lora": {"r": 4}}}
    assert difference(old, new) == [
        "model.lora: {} -> (absent)",
        "model.lora.r: (absent) -> 4",
        "seed: 0 -> 1",
    ]


def test_the_revision_of_a_hub_id_is_no_part_of_a_run_on_local_rows(tmp_path):
    def config(path, revision) -> dict:
        return {"task": {"path": str(path), "revision": revision, "evaluation": {"path": "a/b", "revision": revision}}}

    assert difference(config(tmp_path, None), config(tmp_path, "v1")) == ["task.evaluation.revision: None -> v1"]
    assert difference(config("a/b", None), config("a/b", "v1"))[1:] == ["task.revision: None -> v1"]


@pytest.fixture
def folders(tmp_path):
    """Folders with weights: of a model, of an adapter on it, and of a model as a GGUF file."""
    made = {name: tmp_path / name for name in ("model", "adapter", "gguf")}
    files = {"model": "model.safetensors", "adapter": "adapter_model.safetensors", "gguf": "model.gguf"}
    for name, folder in made.items():
        folder.mkdir()
        (folder / files[name]).write_text(name)
    config = {"peft_type": "LORA", "base_model_name_or_path": str(made["model"])}
    (made["adapter"] / "adapter_config.json").write_text(json.dumps(config))
    return made


@pytest.mark.parametrize(
    ("model", "checkpoint", "files"),
    [
        ("model", None, ["model/model.safetensors"]),
        ("gguf", None, ["gguf/model.gguf"]),
        ("tiny", "model", ["model/model.safetensors"]),
        ("tiny", "adapter", ["adapter/adapter_model.safetensors"]),
        ("model", "adapter", ["adapter/adapter_model.safetensors", "model/model.safetensors"]),
        ("adapter", None, ["adapter/adapter_model.safetensors", "model/model.safetensors"]),
        ("gguf", "model", ["model/model.safetensors"]),  # the whole policy: nothing is read of the model
    ],
)
def test_weights_have_another_digest_after_a_file_that_is_read_has_been_rebuilt_and_no_other(
    folders, model, checkpoint, files
):
    group = OmegaConf.create({"name": str(folders.get(model, model)), "gguf_file": "model.gguf"})

    def digest():
        return weights_digest(group, None if checkpoint is None else folders[checkpoint])

    read = [file for file in sorted(folders["model"].parent.glob("*/*model.*"))]
    for file in read:
        before, content = digest(), file.read_text()
        file.write_text("rebuilt")
        assert (digest() != before) == (str(file.relative_to(file.parents[1])) in files)
        file.write_text(content)


def test_weights_that_lie_in_no_file_here_have_no_digest_and_a_folder_without_any_is_refused(tmp_path):
    for name in ("tiny", "Qwen/Qwen2.5-0.5B"):
        assert weights_digest(OmegaConf.create({"name": name}), None) is None
    with pytest.raises(RunError, match=r"checkpoint=.* holds no \*.safetensors and no \*.bin. Give a folder with"):
        weights_digest(OmegaConf.create({"name": "tiny"}), str(tmp_path))


def test_documented_list_of_keys_that_say_only_where_and_how_is_the_one_in_the_code():
    documented = (ROOT / "docs" / "runs.md").read_text()
    listed = re.search(r"do not make it a different run: (.*?)\. ", documented.replace("\n", " "))[1]
    assert re.findall(r"`([^`]+)`", listed) == list(WHERE_AND_HOW)


def test_documented_names_are_those_of_their_commands():
    documented = (ROOT / "docs" / "runs.md").read_text()
    (long,) = re.findall(r"`(model\.name=/models/\S+ .*)` is\n", documented)
    for command in ("log_energy=True", "baseline.tail=carry learning_rate=1e-3", long):
        assert f"    {name(*command.split())}\n" in documented


def test_documented_exit_codes_are_those_in_the_code():
    documented = (ROOT / "docs" / "runs.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", documented, flags=re.MULTILINE)
    codes = {name: value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
    assert {name: int(code) for code, name in rows} == codes


@pytest.mark.parametrize(
    ("typed", "taken"),
    [
        ("model.name=runs/otb-n4-rate=1e-3/best", "model.name='runs/otb-n4-rate=1e-3/best'"),
        ("++model.name=a=1", "++model.name='a=1'"),
        ("run=otb-n4-tasks=aime24,aime25-1a2b/best", "run='otb-n4-tasks=aime24,aime25-1a2b/best'"),
        ("checkpoint=it's/a=1", r"checkpoint='it\'s/a=1'"),
        ("checkpoint=40", "checkpoint='40'"),
        ("model.name='a=1'", "model.name='a=1'"),
        ("model.name=/models/Qwen2.5-7B", "model.name=/models/Qwen2.5-7B"),
        ("model.name=a,b", "model.name=a,b"),  # which is refused without -m
        ("checkpoint=null", "checkpoint=null"),
        ("steps=a=1", "steps=a=1"),
    ],
)
def test_paths_are_quoted_where_hydra_would_not_read_them(typed, taken):
    assert quoted(typed) == taken


def test_each_path_of_a_sweep_is_quoted_as_in_a_run_of_its_own():
    """So that the run has the same directory there."""
    assert quoted("model.name=a/rate=1,b,c/rate=2", several=True) == "model.name='a/rate=1',b,'c/rate=2'"
    given = accept_open_keys(["model.name=a/rate=1,b", "-m", "task.path=c=1"])
    assert given == ["-m", "++model.name='a/rate=1',b", "++task.path=c=1"]
