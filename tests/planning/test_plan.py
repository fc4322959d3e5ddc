"""The plan of a run: parameter counts, memory by part, hours and disk against values by hand, refusals, the command."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments.checks import check
from experiments.plan import plan
from experiments.planning import memory
from experiments.planning.architectures import FOLDER, Architecture, architecture_of
from experiments.planning.costs import Card, Rates, Run, disk, forward_flops, hours, response_tokens
from experiments.planning.fit import refuse_if_it_cannot_fit, step_of, vllm_gpus, vllm_share, why_not
from experiments.planning.memory import Step, kept_by_layer, kv_bytes_per_token, moments, needed, state, vllm_room
from otb.errors import RunError
from tests.support.commands import ROOT, run_command_line, run_light
from tests.support.recipes import composed

PARAMETERS = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B-Base": 596_049_920,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-8B-Base": 8_190_735_360,
    "Qwen/Qwen3-14B-Base": 14_768_307_200,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
}
QWEN_7B, QWEN_8B = architecture_of("Qwen/Qwen2.5-7B"), architecture_of("Qwen/Qwen3-8B-Base")
P = PARAMETERS["Qwen/Qwen2.5-7B"]
# The paper's tool use: 256 rollouts a GPU of 8, up to 8192 tokens.
PAPER = Step(QWEN_7B, "bfloat16", rollouts=256, forward=8, prompt=512, response=8192, processes=8)
FSDP2, ZERO3, VLLM = {"parallel": "fsdp2"}, {"parallel": "zero3"}, {"sampler": "vllm"}
CARD = Card(memory=80e9, flops=312e12, bandwidth=2039e9)
GUESSES = Rates(0.35, None, 0.5, None, 0.03)
OF_A_RUN = Run(steps=10, rollouts=2048, mean_response=4096, scores=True, evaluations=2, evaluation_rollouts=960)


# ---- architectures


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_model_that_transformers_builds(name):
    assert sum(parameter.numel() for parameter in built(name).parameters()) == PARAMETERS[name]
    assert architecture_of(name).parameters == PARAMETERS[name]


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_lora_parameters_are_those_that_peft_adds(targets):
    from peft import LoraConfig, get_peft_model

    name = "HuggingFaceTB/SmolLM2-135M"
    model = get_peft_model(built(name), LoraConfig(r=16, target_modules=targets, task_type="CAUSAL_LM"))
    added = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert architecture_of(name).lora_parameters(16, None if targets == "all-linear" else targets) == added


def built(name: str):
    """Returns the model that transformers builds from a file of conf/architectures, without numbers in it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    file = next(file for file in FOLDER.glob("*.json") if name in json.loads(file.read_text())["models"])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(file.read_text())))


def test_tiny_architecture_is_that_of_the_tiny_policy(tokenizer, policy):
    from otb.policies.tiny_policy import model_config

    described = json.loads((FOLDER / "tiny.json").read_text())
    made = model_config(tokenizer).to_dict()
    differing = {key: made[key] for key in described if key != "models" and made[key] != described[key]}
    assert not differing, f"put these into conf/architectures/tiny.json: {differing}"
    assert architecture_of(str(policy)) == architecture_of("tiny")  # a folder has its own config.json


def test_every_model_of_conf_has_an_architecture():
    for file in (ROOT / "conf" / "model").glob("*.yaml"):
        name = OmegaConf.to_container(OmegaConf.load(file)).get("name", "???")
        assert name == "???" or architecture_of(name), f"describe {name} in conf/architectures"


def test_a_hub_id_that_nobody_described_has_the_architecture_in_the_cache_at_its_revision(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for model, revision in (("qwen2.5-7b", "main"), ("qwen3-0.6b-base", "v1")):
        cache_model(tmp_path, "OWNER/NAME", FOLDER / f"{model}.json", revision)
    assert architecture_of("OWNER/NAME") == QWEN_7B
    assert architecture_of("OWNER/NAME", "v1") == architecture_of("Qwen/Qwen3-0.6B-Base")
    assert step_of(run_of_the_paper(model__name="OWNER/NAME", model__revision="v1"), 80e9).architecture.layers == 28
    with pytest.raises(RunError, match="model.name=OWNER/NAME: needs 212 GB a GPU"):
        refuse_if_it_cannot_fit(run_of_the_paper(model__name="OWNER/NAME", parallel__name="ddp"), 80e9)


def cache_model(cache: Path, hub_id: str, config: Path, revision: str) -> None:
    """Puts a config.json into a cache of the hub."""
    folder = cache / f"models--{hub_id.replace('/', '--')}"
    for part in (f"snapshots/of-{revision}", "refs"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(f"of-{revision}")
    shutil.copy(config, folder / "snapshots" / f"of-{revision}" / "config.json")


def test_unknown_architectures_are_refused_with_what_to_do(tmp_path):
    with pytest.raises(RunError, match=r"model.name=OWNER/NAME has no architecture .* Add a copy of its config.json"):
        architecture_of("OWNER/NAME")
    with pytest.raises(RunError, match="prefetch.py --model OWNER/NAME --revision v1$"):
        architecture_of("OWNER/NAME", "v1")
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(RunError, match="describes model_type=mamba"):
        architecture_of(str(tmp_path))


# ---- memory


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 121.85e9),  # weights, gradients and optimizer take 16 bytes a parameter: 7.6156 B x 16
        (FSDP2, 15.23e9),  # over 8 GPUs
        (ZERO3, 15.23e9),  # 2 + 2 + 12 bytes
        ({"architecture": QWEN_8B}, 131.05e9),
        ({"lora_rank": 32}, 16.52e9),  # 7.6156 B frozen in bfloat16, 15.23, and 80.7 M adapters x 16 B, 1.29
        ({"dtype": "float32", "sampler": "hf_bfloat16"}, 18 * P),  # the copy that samples has 2 bytes more
        ({"reference": True}, 121.85e9 + 30.46e9),  # a second copy of the weights, 4 bytes a parameter
        (FSDP2 | {"reference": True}, 15.23e9 + 3.81e9),
        (ZERO3 | {"reference": True}, 15.23e9 + 1.90e9),  # in bfloat16 alone
    ],
)
def test_weights_gradients_and_optimizer_take_what_their_numbers_do(changes, expected):
    assert state(replace(PAPER, **changes)) == pytest.approx(expected, rel=1e-3)


CACHE = 256 * (512 + 8192) * 57_344  # of 256 rollouts at full length, in bfloat16


@pytest.mark.parametrize(
    ("measured", "changes", "expected"),
    [
        # the cache is float32 over float32 weights, and covers the rows that are generated at a time
        (lambda step: moments(step)["sampling"]["kv_cache"], {}, 2 * CACHE),
        (lambda step: moments(step)["sampling"]["kv_cache"], {"rows": 32}, 2 * CACHE / 8),
        (lambda step: moments(step)["sampling"]["kv_cache"], {"lora_rank": 8}, CACHE),
        (lambda step: moments(step)["sampling"]["kv_cache"], {"dtype": "float32", "sampler": "hf_bfloat16"}, 2 * CACHE),
        # fsdp2 keeps whole gradients over several forwards, unless each is reduced or there is one
        (memory.gradients, FSDP2, 4 * P),
        (memory.gradients, FSDP2 | {"sync_each_forward": True}, 4 * P / 8),
        (memory.gradients, FSDP2 | {"forward": 256}, 4 * P / 8),
        # ddp of several processes has a second copy of the gradients
        (memory.buckets, {}, 4 * P),
        (memory.buckets, {"processes": 1}, 0),
        (memory.buckets, {"lora_rank": 32}, 4 * QWEN_7B.lora_parameters(32)),
        # vLLM that sleeps takes its share while sampling alone
        (lambda step: moments(step)["sampling"]["vllm"], FSDP2 | VLLM, 0.3 * 80e9),
        (lambda step: moments(step)["backward of a layer"]["vllm"], FSDP2 | VLLM, 0),
        (lambda step: moments(step)["backward of a layer"]["vllm"], FSDP2 | VLLM | {"sleep": False}, 0.3 * 80e9),
        (lambda step: needed(replace(step, sleep=False)) - needed(step), FSDP2 | VLLM, 24e9),
        # its cache holds (24 - 15.23) GB / (8704 x 57,344 B) = 17.6 rollouts; each of two GPUs has half of the weights
        # and of the key-value heads
        (vllm_room, VLLM, (24e9 - 2 * P) / (8704 * 57_344)),
        (vllm_room, VLLM | {"tensor_parallel": 2}, (24e9 - P) / (8704 * 57_344 / 2)),
        (memory.logits_avoided, {}, 4 * 8 * 8192 * 152_064),  # 39.9 GB
        (lambda step: kv_bytes_per_token(step.architecture), {}, 57_344),  # 2 x 28 x 4 x 128 x 2
        (
            lambda step: kv_bytes_per_token(step.architecture),
            {"architecture": QWEN_8B},
            147_456,
        ),  # 2 x 36 x 8 x 128 x 2
        # checkpointing keeps the inputs of 28 layers in place of what they keep
        (
            lambda step: (
                moments(replace(step, checkpointing=False))["LM head"]["activations"]
                - moments(step)["LM head"]["activations"]
            ),
            FSDP2,
            28 * (kept_by_layer(replace(PAPER, **FSDP2), 8) - 8 * 8704 * 3584 * 2),
        ),
    ],
)
def test_parts_of_memory_have_the_bytes_counted_by_hand(measured, changes, expected):
    assert measured(replace(PAPER, **changes)) == pytest.approx(expected)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("float32", {"dtype": "float32"}),
        ("bfloat16", {"dtype": "bfloat16", "parallel": "fsdp2"}),
        ("mixed", {"dtype": "bfloat16"}),
        ("lora float32", {"dtype": "float32", "lora_rank": 8}),
        ("lora bfloat16", {"dtype": "bfloat16", "lora_rank": 8}),
    ],
)
def test_what_a_layer_keeps_is_what_autograd_saves(model_type, precision, options):
    shape = Architecture(model_type, 192, 2, 6, 2, 32, 640, vocabulary=64, tied=True)
    step = Step(shape, rollouts=4, forward=4, prompt=16, response=48, **options)
    assert step.precision == precision
    assert kept_by_layer(step, 4) == pytest.approx(saved_by_autograd(step), rel=0.02)


def saved_by_autograd(step: Step) -> int:
    """Returns bytes of the distinct tensors that the second layer of a padded batch saves, without those of weights."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    a = step.architecture
    config = AutoConfig.for_model(
        a.model_type, hidden_size=a.hidden, num_hidden_layers=a.layers, num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads, head_dim=a.head_dim, intermediate_size=a.intermediate, vocab_size=a.vocabulary,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    if step.dtype == "bfloat16" and step.precision != "mixed":
        model = model.to(torch.bfloat16)
    if step.lora_rank:
        options = LoraConfig(r=step.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, options).get_base_model()
    # A weight, or its copy in bfloat16, has a shape that no activation has.
    shapes = {shape for weight in model.parameters() for shape in (weight.shape, weight.shape[::-1])}
    saved, inside = {}, []

    def keep(tensor):
        if inside and tensor.shape not in shapes:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    model.model.layers[1].register_forward_pre_hook(lambda *_: inside.append(True))
    model.model.layers[1].register_forward_hook(lambda *_: inside.clear())
    mask = torch.ones(step.forward, step.width)
    mask[0, :5] = 0  # padded on the left: without padding there would be no mask
    ids = torch.zeros(step.forward, step.width, dtype=torch.long)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=step.precision in ("mixed", "lora bfloat16"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        model.model(ids, attention_mask=mask, use_cache=False)
    return sum(storage.nbytes() for storage in saved.values())


# ---- whether it fits


def run_of_the_paper(**changed):
    """The composed keys that fit.py reads, as conf/parallel and conf/rollouts_by write them."""
    values = {
        "model": {"name": "Qwen/Qwen2.5-7B", "dtype": "bfloat16", "rollouts_per_forward": 8, "lora": {}},
        "task": {"max_completion_length": 8192},
        "trainer": {},
        "group_size": 16,
        "prompts_per_step": 128,
        "max_prompt_length": 512,
        "gpus": 8,
        "parallel": {"name": "fsdp2", "trainer": {}},
        "rollouts_by": {"name": "vllm", "tensor_parallel": 1, "memory_share": 0.3, "sleep": True},
    }
    cfg = OmegaConf.create(values)
    for key, value in changed.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, force_add=True)
    return cfg


@pytest.mark.parametrize(
    ("model", "beta", "held"),
    [("qwen2.5-7b", 0.01, True), ("qwen2.5-7b", 0.0, False), ("qwen2.5-7b-lora", 0.01, False)],
)
def test_a_run_as_composed_is_ddp_with_hf_generate_and_a_reference_model_for_a_kl_term_without_lora(model, beta, held):
    step = step_of(composed("task=gsm8k", f"model={model}", f"++trainer.beta={beta}"), 80e9)
    assert step.reference == held
    assert (step.parallel, step.sampler, step.processes, step.rollouts) == ("ddp", "hf", 1, 16 * 4)


def test_processes_are_those_that_a_launcher_of_slurm_starts_else_gpus():
    cfg = run_of_the_paper()
    assert (step_of(cfg, 80e9).processes, step_of(cfg, 80e9).rollouts) == (8, 256)
    cfg.hydra = {"launcher": {"nodes": 2, "tasks_per_node": 8}}
    assert step_of(cfg, 80e9).processes == 16


def test_refusal_says_what_is_needed_and_what_would_fit():
    with pytest.raises(RunError) as refused:
        refuse_if_it_cannot_fit(run_of_the_paper(parallel__name="ddp"), 80e9)
    text = str(refused.value)
    assert text.startswith(
        "model.name=Qwen/Qwen2.5-7B: needs 212 GB a GPU under parallel=ddp over 8 GPUs (122 GB of it "
    )
    assert "the card has 80. Try parallel=fsdp2" in text
    fix = dict(pair.split("=") for pair in text.partition("Try ")[2].rstrip(".").split())
    assert fix.pop("parallel") == "fsdp2"
    mended = run_of_the_paper(**{key.replace(".", "__"): json.loads(value) for key, value in fix.items()})
    refuse_if_it_cannot_fit(mended, 80e9)


QWEN_14B = {"model__name": "Qwen/Qwen3-14B-Base", "rollouts_by__tensor_parallel": None}  # 29.5 GB of weights


@pytest.mark.parametrize(
    ("changed", "gpus"),
    [
        ({"rollouts_by__tensor_parallel": None}, 1),
        (QWEN_14B, 2),  # 24 GB of memory
        (QWEN_14B | {"rollouts_by__memory_share": 0.5}, 1),
        (QWEN_14B | {"rollouts_by__memory_share": 0.01}, 1),  # no number is enough
        (QWEN_14B | {"gpus": 3, "prompts_per_step": 3}, 1),  # 3 does not divide the 40 heads
        (QWEN_14B | {"task__max_turns": 5}, 1),
        (QWEN_14B | {"rollouts_by__tensor_parallel": 4}, 4),
    ],
)
def test_vllm_gets_as_few_gpus_as_hold_the_policy(changed, gpus):
    cfg = run_of_the_paper(**changed)
    assert step_of(cfg, 80e9).tensor_parallel == vllm_gpus(cfg, 80e9) == gpus


def test_vllm_gets_what_the_trainer_leaves_of_the_gpu():
    """Where it sleeps, of the moment of sampling; else of every moment. A tenth of the GPU stays free."""
    asleep, awake = (
        run_of_the_paper(rollouts_by__memory_share=None, rollouts_by__sleep=sleep, model__rollouts_per_forward=2)
        for sleep in (True, False)
    )
    for cfg in (asleep, awake):
        step = step_of(cfg, 80e9)
        held = {moment: sum(parts.values()) for moment, parts in moments(replace(step, memory_share=0.0)).items()}
        beside = held["sampling"] if cfg is asleep else max(held.values())
        assert vllm_share(cfg, 80e9) == step.memory_share
        assert 0 <= 0.9 - beside / 80e9 - step.memory_share < 0.05
    assert (vllm_share(asleep, 80e9), vllm_share(run_of_the_paper(), 80e9)) == (0.7, 0.3)
    unknown = run_of_the_paper(
        model__name="OWNER/NAME", rollouts_by__memory_share=None, rollouts_by__tensor_parallel=None
    )
    assert (vllm_share(unknown, 80e9), vllm_gpus(unknown, 80e9)) == (0.3, 1)
    assert (vllm_share(asleep, None), vllm_gpus(run_of_the_paper(**QWEN_14B), None)) == (0.3, 1)  # no GPU is known
    del asleep["prompts_per_step"]  # an evaluation: 15.2 GB of weights in bfloat16
    assert (vllm_share(asleep, 80e9), vllm_share(asleep, 24e9)) == (0.7, 0.25)


@pytest.mark.parametrize(
    ("changed", "memory", "refusal"),
    [
        ({"trainer__accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}, 80e9, None),
        ({"model__rollouts_per_forward": 4}, 80e9, None),
        ({"model__rollouts_per_forward": 4, "model__lora": {"r": 32}}, 80e9, None),
        ({"model__name": "OWNER/NAME"}, 80e9, None),
        ({"parallel__name": "ddp"}, 194e9, None),  # 212 needed, and a tenth more than 194 is 213
        ({"parallel__name": "ddp"}, 192e9, "needs 212 GB"),
        (
            {"model__name": "Qwen/Qwen3-14B-Base"},
            80e9,
            r"memory_share=0.3 of 80 GB .* \(29.5 GB a GPU\) .* leaves 0.65\. Use",
        ),
    ],
)
def test_a_run_is_refused_where_it_is_known_not_to_fit_and_above_the_error_of_the_formulas(changed, memory, refusal):
    cfg = run_of_the_paper(**changed)
    if refusal is None:
        refuse_if_it_cannot_fit(cfg, memory)
        return
    with pytest.raises(RunError, match=refusal):
        refuse_if_it_cannot_fit(cfg, memory)


def test_a_card_is_checked_before_anything_is_loaded_or_submitted(monkeypatch):
    large = composed("model=qwen2.5-7b", "task=gsm8k", "card=l4-24gb")
    for cfg, reason in (
        (large, r"needs \d+ GB a GPU .* the card has 24.* Or card=null"),
        (composed("card=l4"), "card=l4 is no GPU of conf/plan.yaml. Known: a100-40gb"),
    ):
        with pytest.raises(RunError, match=reason):
            check(cfg)
    check(composed("model=qwen2.5-0.5b", "task=gsm8k", "card=l4-24gb"))
    large.card = None
    check(large)
    monkeypatch.setattr("experiments.running.devices.gpu_memory", lambda: 24e9)  # the GPU that is here
    with pytest.raises(RunError, match=r"needs \d+ GB a GPU .* the card has 24"):
        check(large)
    OmegaConf.update(large, "trainer.use_cpu", True, force_add=True)
    check(large)


def test_reserve_counts_when_a_fit_is_asked_for():
    step = replace(PAPER, parallel="fsdp2", sampler="vllm", sync_each_forward=True, card=80e9)
    assert why_not(replace(step, card=needed(step) + 2e9), reserve=2e9) is None
    assert "1 of them in reserve" in why_not(replace(step, card=needed(step) + 0.9e9), reserve=1e9)


# ---- sweeps for SLURM


@pytest.fixture
def slurm(tmp_path):
    """send(*arguments) -> the command of a sweep, at a sbatch that takes everything."""
    for name, does in {"sbatch": "echo Submitted batch job 7", "srun": "exit 1", "squeue": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)

    def send(*arguments: str) -> subprocess.CompletedProcess:
        given = ["-m", "wait=false", "task=gsm8k", f"runs_dir={tmp_path / 'runs'}", *arguments]
        home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_CACHE": str(tmp_path / "home" / "hub")}
        return run_light(given, PATH=f"{tmp_path}:{os.environ['PATH']}", **home)

    return send


def test_a_sweep_for_slurm_without_a_card_is_checked_by_the_largest_one(slurm, tmp_path):
    refused = slurm("hydra/launcher=slurm_8gpu", "model=qwen2.5-7b")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    for said in (
        "error: model.name=Qwen/Qwen2.5-7B: needs 183 GB a GPU under parallel=ddp over 8 GPUs",
        "the card has 141. Try parallel=fsdp2",
        "With card=null this is h200-141gb, the largest of conf/plan.yaml",
    ):
        assert said in refused.stderr
    assert not list((tmp_path / "runs").rglob("job-*.json"))
    for fits in (["hydra/launcher=slurm_8gpu", "model=qwen2.5-1.5b"], ["hydra/launcher=slurm_cpu", "model=qwen2.5-7b"]):
        sent = slurm(*fits)
        assert "\n1 of 1 runs submitted as job 7" in sent.stdout and sent.stderr == "", sent.stderr


@pytest.mark.parametrize(
    ("given", "starts"),
    [
        (("hydra/launcher=slurm",), "1 process"),
        (("hydra/launcher=slurm_nodes", "hydra.launcher.nodes=2"), "16 processes"),
    ],
)
def test_a_sweep_for_slurm_is_refused_where_gpus_is_not_what_its_launcher_starts(slurm, given, starts):
    refused = slurm(*given, "gpus=8")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert f"error: gpus=8 is not the {starts} that SLURM's launcher starts" in refused.stderr
    sent = slurm(*given, f"gpus={starts.split()[0]}")
    assert "gpus=" not in sent.stderr, sent.stderr


def test_a_sweep_of_a_hub_id_is_checked_by_its_cached_configuration_or_told_that_it_was_not(slurm, tmp_path):
    given = ["hydra/launcher=slurm_8gpu", "model=hub", "model.name=OWNER/NAME", "seed=0,1", "card=a100-80gb"]
    unknown = slurm(*given)
    assert "\n2 of 2 runs submitted as job 7" in unknown.stdout
    assert unknown.stderr.startswith("note: memory was not checked: model.name=OWNER/NAME has no architecture in conf/")
    assert unknown.stderr.endswith("or run: python experiments/prefetch.py --model OWNER/NAME\n")
    assert unknown.stderr.count("note: ") == 1  # of two runs
    assert slurm(*given[:-1], "sweep=other").stderr == unknown.stderr  # without a card
    cache_model(tmp_path / "home" / "hub", "OWNER/NAME", FOLDER / "qwen2.5-7b.json", "main")
    refused = slurm(*given)
    assert refused.returncode == 2 and "model.name=OWNER/NAME: needs 183 GB a GPU" in refused.stderr
    assert "the card has 80" in refused.stderr and "note: " not in refused.stderr


# ---- tokens, hours, disk


def test_hours_follow_from_flops_and_throughputs():
    step = replace(PAPER, **FSDP2, **VLLM)
    # 2 operations per parameter without the embedding table, 4 x 28 x 3584 x 8704 of the attention; 4 passes
    assert forward_flops(step) == 2 * (P - 152_064 * 3584 - 3584) + 4 * 28 * 3584 * 8704
    seconds = 10 * 256 * 8704 * 4 * forward_flops(step) / (312e12 * 0.35)
    spent = hours(step, OF_A_RUN, CARD, GUESSES)
    assert spent.training == pytest.approx(seconds * 8 / 3600)
    improving = hours(step, replace(OF_A_RUN, improves=True), CARD, GUESSES)  # 3 passes more, of a second update
    assert improving.training == pytest.approx(7 / 4 * spent.training)
    stated = replace(GUESSES, training_tokens_per_second=5000, sampling_tokens_per_second=2000)
    spent = hours(step, OF_A_RUN, CARD, stated)
    assert spent.training == pytest.approx(10 * 256 * 8704 / 5000 * 8 / 3600)
    assert spent.sampling == pytest.approx(10 * 256 * 4096 / 2000 * 8 / 3600)
    assert spent.evaluation == pytest.approx(2 * 120 * 4096 / 2000 * 8 / 3600)
    assert spent.total == pytest.approx(spent.training + spent.sampling + spent.evaluation)
    assert response_tokens(OF_A_RUN) == 10 * 2048 * 4096


def test_sampling_is_never_faster_than_one_response_of_full_length():
    step = replace(PAPER, rollouts=1, forward=1, sampler="vllm", processes=8)
    # one rollout reads 2 bytes a parameter for each of 8192 tokens, and its cache: half a response behind the prompt
    of_a_token = (2 * P + 57_344 * (512 + 4096)) / (2039e9 * 0.5)
    sampling = hours(step, Run(1, 8, 4096, False, 0, 0), CARD, GUESSES).sampling
    assert sampling == pytest.approx(8192 * of_a_token * 8 / 3600)


def test_hours_of_what_cannot_be_estimated_are_not_made_up():
    unknown = replace(OF_A_RUN, evaluation_rollouts=None)
    assert hours(replace(PAPER, sampler="vllm"), unknown, CARD, GUESSES).total is None
    assert hours(replace(PAPER, **FSDP2), OF_A_RUN, CARD, GUESSES).sampling is None  # sharded weights meet generate


@pytest.mark.parametrize(
    ("changes", "last", "best"),
    [
        ({}, 12, 4),  # float32 weights and AdamW's moments, 91.4 GB; the weights, 30.5 GB
        (FSDP2, 14, 2),  # the whole policy in bfloat16 beside them
        (ZERO3 | {"dtype": "float32"}, 16, 4),
    ],
)
def test_disk_holds_weights_and_moments_of_the_last_and_weights_of_the_best(changes, last, best):
    sizes = disk(replace(PAPER, **changes), OF_A_RUN, kept_rollouts=1600, bytes_per_token=24)
    assert sizes["last checkpoint"] == sizes["while one is written"] == last * P
    assert sizes["best checkpoint"] == best * P
    assert sizes["rollouts kept"] == 1600 * 4096 * 24


# ---- the command


@pytest.mark.parametrize(("recipe", "prompts"), [("paper_single_turn", 64), ("paper_tool_use_group_size", 128)])
def test_plan_of_a_recipe_has_every_arm_and_group_size_with_its_tokens(recipe, prompts):
    plans, _ = plan([f"experiment={recipe}", "response_share=0.5"])
    tokens = {(arm, entry.cfg.group_size): response_tokens(run) for entry in plans for arm, run in entry.runs.items()}
    assert tokens == {(arm, n): 500 * prompts * n * 8192 * 0.5 for arm in ("otb", "group_mean") for n in (4, 8, 16, 32)}
    assert {arm: run.scores for arm, run in plans[0].runs.items()} == {"otb": True, "group_mean": False}


def test_plan_counts_all_60_runs_of_a_sweep_and_typed_keys_replace_its_axes():
    plans, _ = plan(["-m", "experiment=group_size"])
    assert sum(len(entry.runs) * entry.seeds for entry in plans) == 60
    (entry,), _ = plan(["experiment=group_size", "group_size=2", "seed=0,1", "baseline=otb,rloo", "sweep=mine"])
    assert (list(entry.runs), entry.seeds, entry.cfg.group_size) == (["otb", "rloo"], 2, 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["card=h100"], "card=h100 is not known. Did you mean h100-80gb?"),
        (["card=mine", "cards.mine.memory_gb=48"], "cards.mine.tflops=None must be a positive number"),
        (["response_share=much"], "response_share=much must be a positive number"),
        (["claimed_saving.tool=0.5"], "claimed_saving.tool is no key of conf/plan.yaml. Did you mean tools?"),
        (["response_shar=0.5"], "response_shar is no key of this project"),
        (["model=hub", "model.name=OWNER/NAME"], "model.name=OWNER/NAME has no architecture in conf/architectures"),
        (["group_size=0"], "group_size=0 must be a whole number >= 1"),
    ],
)
def test_plan_refuses_with_value_rule_and_fix(arguments, text):
    with pytest.raises(RunError) as refused:
        plan(arguments)
    assert text in str(refused.value)


def test_command_prints_memory_hours_disk_and_the_claim():
    done = run_command_line(["experiment=paper_tool_use", "hydra/launcher=slurm_8gpu", "card=h100-80gb"], script="plan")
    assert done.returncode == 0, done.stderr
    printed = ["7.62 B parameters", "8 x h100-80gb", "4.19 B", "66% fewer tokens", "backward of a layer"]
    for text in [*printed, "57 kB a token"]:
        assert text in done.stdout
    refused = run_command_line(["card=none"], script="plan")
    assert refused.returncode == 2 and refused.stderr.startswith("error: card=none is not known")


def test_plan_answers_without_importing_torch():
    code = "import sys; from experiments.plan import command_line; command_line(['experiment=stability']);"
    code += "sys.exit(bool({'torch', 'trl', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0
