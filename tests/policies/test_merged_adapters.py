"""Tests folders of adapters, such as checkpoints of a LoRA run: merged into their base once, or refused with a fix."""

import json
import shutil
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments import checks
from experiments.evaluation.evaluator import Evaluator
from experiments.planning.architectures import architecture_of
from experiments.running.train import train
from otb.errors import RunError
from otb.policies.models import describe_policy, load_model, model_facts, policy_folder
from otb.records import RunDirectory
from tests.support import commands
from tests.support.commands import rows
from tests.support.recipes import composed, run_of

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35]])


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OTB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def adapter(policy, tmp_path, cache):
    """Returns the folder of an adapter that changes the tiny policy: B is random, not 0. It has no tokenizer."""
    folder, base = tmp_path / "adapter", load_model(str(policy), None, "float32")
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


def merged(adapter) -> str:
    return policy_folder(str(adapter), None, {})


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def change(file, **values) -> None:
    """Sets keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_an_adapter_is_merged_to_the_policy_that_it_makes_of_its_base(policy, adapter):
    base = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    unchanged = logits(base)
    expected = logits(PeftModel.from_pretrained(base, adapter))
    found = load_model(merged(adapter), None, "float32")
    torch.testing.assert_close(logits(found), expected, rtol=1e-5, atol=1e-5)
    assert (expected - unchanged).abs().max() > 0.1
    plain = load_model(str(policy), None, "float32")
    assert type(found) is type(plain) and found.state_dict().keys() == plain.state_dict().keys()  # no adapter in it
    assert len(found.generation_config.eos_token_id) > 1  # the base's ends


@pytest.mark.parametrize(("command", "model"), [("run", "adapter"), ("run", "tiny"), ("evaluate", "tiny")])
def test_several_processes_have_a_whole_folder_before_they_are_a_group(command, model, adapter, tmp_path, monkeypatch):
    """In a process group, rank 1 would write a folder without weights; with ZeRO-3 it would wait forever for rank 0."""
    whole = []

    def begin_group(*given, **options):
        whole.extend(len(load_file(file)) for file in (tmp_path / "cache").glob("*/model.safetensors"))
        raise KeyboardInterrupt

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("experiments.running.train.OTBConfig", begin_group)
    monkeypatch.setattr("experiments.evaluation.evaluator.OTBConfig", begin_group)
    for name in ("task_inputs", "trainer_options"):
        monkeypatch.setattr(f"experiments.evaluation.evaluator.{name}", lambda *given: {})
    given = (
        [f"model.name={adapter}"]
        if model == "adapter"
        else ["+model.warm_start.steps=1", "+model.warm_start.careful_steps=0"]
    )
    cfg = composed(*given, "threads=1")
    with pytest.raises(KeyboardInterrupt):
        if command == "run":
            train(run_of(cfg, processes=2), RunDirectory(tmp_path / "run"), None, [], Mock())
        else:
            tasks = {"arithmetic": run_of(cfg).task}
            Evaluator(Mock(cfg=cfg, configurations={"arithmetic": cfg}, tasks=tasks), Mock())
    assert whole == [35]


def test_config_is_the_bases_and_the_tokenizer_the_one_beside_the_adapter_if_there_is_one(policy, adapter):
    tokenizer, config = describe_policy(str(adapter), None)
    of_base, config_of_base = describe_policy(str(policy), None)
    assert config.to_diff_dict() | {"dtype": None} == config_of_base.to_diff_dict() | {"dtype": None}
    assert (tokenizer.chat_template, tokenizer.padding_side) == (of_base.chat_template, "left")
    own = AutoTokenizer.from_pretrained(policy)
    own.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    own.save_pretrained(adapter)
    assert describe_policy(str(adapter), None)[0].chat_template == own.chat_template


def test_the_second_time_the_cache_answers_and_for_other_weights_it_does_not(policy, adapter, tmp_path, monkeypatch):
    first = merged(adapter)
    monkeypatch.setattr("otb.policies.merged_adapters._load", None)
    assert merged(adapter) == first
    monkeypatch.undo()
    monkeypatch.setenv("OTB_CACHE", str(tmp_path / "cache"))
    change(adapter / "adapter_config.json", lora_alpha=16)
    other_scale = merged(adapter)
    shutil.copytree(policy, tmp_path / "base")
    model = load_model(str(policy), None, "float32")
    model.model.norm.weight.data *= 2
    model.save_pretrained(tmp_path / "base")
    change(adapter / "adapter_config.json", base_model_name_or_path=str(tmp_path / "base"))
    assert len({first, other_scale, merged(adapter)}) == 3


def test_the_merged_folder_says_what_it_was_made_from(policy, adapter):
    made_from = model_facts(merged(adapter), None)["model_made_from"]
    assert made_from["adapter"] == str(adapter) and len(made_from["sha256"]["adapter_model.safetensors"]) == 64
    assert made_from["base"] == model_facts(str(policy), None)


def test_an_adapter_on_top_of_a_merged_one_is_merged_with_both(policy, adapter, tmp_path):
    """The second adapter may name the first adapter's folder as its base."""
    second = tmp_path / "second"
    shutil.copytree(adapter, second)
    change(second / "adapter_config.json", base_model_name_or_path=str(adapter))
    model = PeftModel.from_pretrained(load_model(merged(adapter), None, "float32"), adapter)
    torch.testing.assert_close(logits(load_model(merged(second), None, "float32")), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"base_model_name_or_path": "/no/base"}, "=/no/base, which is not a folder. .* write their path into"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path=None, which is not a folder"),
        ({"peft_type": "PROMPT_TUNING"}, "peft_type=PROMPT_TUNING, but only LoRA adapters .* Merge it yourself"),
    ],
)
def test_adapters_that_cannot_be_used_are_refused_before_anything_is_loaded(adapter, changed, said):
    change(adapter / "adapter_config.json", **changed)
    with pytest.raises(RunError, match=f"model.name={adapter} is an adapter of .*{said}"):
        checks.check_model_and_task(composed(f"model.name={adapter}"))


def test_a_damaged_configuration_of_an_adapter_is_refused(adapter):
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(RunError, match="adapter_config.json that cannot be read: KeyError: 'peft_type'. .* Restore it"):
        merged(adapter)


def test_a_base_of_the_hub_that_is_not_cached_is_refused_with_the_command_that_fetches_it(adapter):
    change(adapter / "adapter_config.json", base_model_name_or_path="someone/some-model", revision="v2")
    said = "its base must be there: base_model_name_or_path=someone/some-model is not a folder .* python experiments/"
    with pytest.raises(RunError, match=said + "prefetch.py --model someone/some-model --revision v2"):
        describe_policy(str(adapter), None)


def test_an_adapter_that_its_base_has_no_place_for_is_refused(policy, adapter):
    change(adapter / "adapter_config.json", target_modules=["no_proj"])
    with pytest.raises(RunError, match=f"cannot be merged into {policy}: .*no_proj.* Restore the folder"):
        merged(adapter)


def test_an_adapter_whose_file_lacks_weights_is_refused(adapter):
    """peft would keep their initial values, which change nothing: the base would silently be the policy."""
    file = adapter / "adapter_model.safetensors"
    save_file(dict(list(load_file(file).items())[1:]), file, {"format": "pt"})
    with pytest.raises(RunError, match="cannot be merged into .*: UserWarning: Found missing adapter keys"):
        merged(adapter)


def test_settings_of_the_tiny_policy_are_refused_by_the_size_of_the_base(adapter, tmp_path):
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text('{"hidden_size": 4096}')
    change(adapter / "adapter_config.json", base_model_name_or_path=str(tmp_path / "large"))
    with pytest.raises(RunError, match="would get the settings of model=tiny"):
        checks.check_model_and_task(composed(f"model.name={adapter}"))


def test_the_planner_counts_the_architecture_of_the_base(policy, adapter):
    assert architecture_of(str(adapter)) == architecture_of(str(policy))


def test_the_best_checkpoint_of_a_run_with_lora_is_a_model_for_another_run(policy, tmp_path):
    """With the same draws, it begins with the accuracy that the first run measured at that checkpoint."""
    sizes = {"task__eval_prompts": 32, "evaluation__every": 1, "checkpoint_every": 1, "steps": 2, "learning_rate": 0.03}
    given = commands.arguments(tmp_path / "first", model__name=policy, model__lora__r=2, **sizes)
    commands.done(given, tmp_path / "log")
    first = RunDirectory(commands.the_run(tmp_path / "first"))
    best = first.checkpoint(first.best_checkpoint_step())
    assert (best / "adapter_config.json").exists() and not (best / "config.json").exists()
    given = commands.arguments(tmp_path / "second", model__name=best, **sizes)
    commands.done(given, tmp_path / "log")
    second = RunDirectory(commands.the_run(tmp_path / "second"))
    measured = {row["step"]: row["accuracy"] for row in rows(first.evaluations_file)}
    assert rows(second.evaluations_file)[0]["accuracy"] == measured[first.best_checkpoint_step()] != measured[0]
    facts = json.loads(second.environment_file.read_text())
    assert facts["model_made_from"]["adapter"] == str(best)
    assert facts["model_made_from"]["base"]["model"] == str(policy)
    assert (second.checkpoint(2) / "config.json").exists()  # the whole policy is trained, not an adapter
