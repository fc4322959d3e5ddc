"""What the command refuses: each with exit code 2 and a short message of the value, the rule and the fix.

SETTINGS are refused before torch is imported, DATA before a model is loaded: there the weights are unreadable, and
reading them would be another error.
"""

import importlib.util
import json
import re
import shutil

import pytest
from huggingface_hub import constants
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from experiments.checks.model import ATTENTION, check_model, check_model_is_here
from experiments.checks.target import check_target
from experiments.running.command_line import accept_open_keys
from experiments.running.processes import counted
from experiments.sweeps.runs_of import plan
from otb.baselines.otb import otb
from otb.errors import RunError
from tests.support import commands
from tests.support.recipes import composed

REFUSED = 2
CHOICES = "is not one of the choices"

# arguments: what the message must say of the value, of the rule, of the fix
SETTINGS = {
    "baseline=ottb": ("baseline=ottb", CHOICES, "Did you mean otb? Choices: "),
    "task=gsm8": ("task=gsm8", CHOICES, "Did you mean gsm8k?"),
    "model=qwen3-8b": ("model=qwen3-8b", CHOICES, "Did you mean qwen3-8b-base?"),
    "trainer=defalt": ("trainer=defalt", CHOICES, "Did you mean default?"),
    "task@task.evaluation=aime2": ("task=aime2", CHOICES, "Did you mean aime25?"),
    "-m baseline=otb,ottb": ("baseline=ottb", CHOICES, "Did you mean otb?"),
    "model.name=tinny": ("model.name=tinny", "no folder and no hub id", "Did you mean tiny?"),
    "model.name=./nowhere": ("model.name=./nowhere", "is not a folder", "Give a folder"),
    "model.name=./otb-n4-rate=1e-3/best": ("model.name=./otb-n4-rate=1e-3/best", "is not a folder", "Give a folder"),
    "-m model.name=./rate=1,tiny baseline=ottb": ("baseline=ottb", CHOICES, "Did you mean otb?"),
    "grup_size=8": ("grup_size", "no key of this project", "Did you mean group_size?"),
    "evaluation.evry=5": ("evaluation.evry", "no key of evaluation", "Did you mean every?"),
    "+evaluation.evry=5": ("evaluation.evry", "no key of evaluation", "Did you mean every?"),
    "steps=[1": ("steps=[1", "cannot be read as KEY=VALUE", "Quote"),
    "model.attn_implementation=flash_attention_2": (
        "attn_implementation=flash_attention_2",
        "needs the package flash-attn",
        "use model.attn_implementation=sdpa",
    ),
    "--steps 10": ("--steps", "written without dashes", "Try steps=VALUE"),
    "group_size=0": ("group_size=0", "whole number >= 1", "Try group_size=4"),
    "group_size=2.5": ("group_size=2.5", "whole number >= 1", "Try group_size=4"),
    "baseline=rloo group_size=1": (
        "group_size=1",
        "needs at least 2",
        "with one rollout (none, otb, energy_probe)",
    ),
    "prompts_per_step=0": ("prompts_per_step=0", "whole number >= 1", "Try prompts_per_step=1"),
    "steps=0": ("steps=0", "whole number >= 1", "Try steps=1"),
    "steps=many": ("steps=many", "whole number >= 1", "Try steps=1"),
    "seed=-1": ("seed=-1", "whole number >= 0", "Try seed=1"),
    "evaluation.samples=0": ("evaluation.samples=0", "whole number >= 1", "Try evaluation.samples=1"),
    "evaluation.every=-1": ("evaluation.every=-1", "whole number >= 0", "Try evaluation.every=1"),
    "evaluation.tasks=[mat500]": ("evaluation.tasks: mat500 is no task", "Did you mean math500?", "Known: "),
    "evaluation.tasks=math500": ("evaluation.tasks=math500", "must be a list", "Try 'evaluation.tasks=[math500]'"),
    "evaluation.tasks=[arithmetic]": ("names arithmetic", "evaluated already", "Leave it out"),
    "evaluation.tasks=[gsm8k_tools]": ("gsm8k_tools is solved with Python", "arithmetic has none", "with tools"),
    "evaluation.max_rows=8": ("evaluation.max_rows=8", "there are none", "Leave it out"),
    "evaluation.tasks=[math500] evaluation.max_rows=0": (
        "evaluation.max_rows=0",
        "whole number >= 1",
        "Try evaluation.max_rows=64",
    ),
    "evaluation.tasks=[math500] evaluation.data_dir=docs": ("math500: path=", "does not exist", "Check the spelling"),
    "evaluation.tasks=[math500] evaluation.data_dir=nowhere": ("data_dir=nowhere", "is not a folder", "per set"),
    "checkpoint_every=-5": ("checkpoint_every=-5", "whole number >= 0", "Try checkpoint_every=1"),
    "rollouts.groups=-1": ("rollouts.groups=-1", "whole number >= 0", "Try rollouts.groups=1"),
    "learning_rate=-1e-6": ("learning_rate=-1e-06", "positive number", "Try learning_rate=1e-6"),
    "learning_rate=0": ("learning_rate=0", "positive number", "Try learning_rate=1e-6"),
    "temperature=0": ("temperature=0", "positive number", "Try temperature=1.0"),
    "overwrite=perhaps": ("overwrite=perhaps", "true or false", "Try overwrite=false"),
    "max_prompt_length=0": ("max_prompt_length=0", "whole number >= 1, or null", "Try max_prompt_length=null"),
    "WORLD_SIZE=2 prompts_per_step=3 group_size=1": ("3 rollouts", "divide over 2 processes", "prompts_per_step=2"),
    "model.rollouts_per_forward=5": ("rollouts_per_forward=5", "must divide the 64 rollouts", "rollouts_per_forward=4"),
    "model.rollouts_per_forward=0": ("rollouts_per_forward=0", "must divide the 64 rollouts", "rollouts_per_forward=1"),
    "measure_gradient_noise=true": ("has 1 of 64", "micro-batches of whole prompt", "rollouts_per_forward=32"),
    "measure_gradient_noise=perhaps": ("measure_gradient_noise=perhaps", "true or false", "Try measure_gradient"),
    "steps=5 trainer.num_iterations=2": ("steps=5", "multiple of trainer.num_iterations=2", "Try steps=4"),
    "trainer.top_p=0.9": ("trainer.top_p=0.9", "not the distribution sampled from", "Use trainer.top_p=1.0"),
    "baseline=rloo trainer.top_p=1.5": ("trainer.top_p=1.5", "must be in (0, 1]", "Try trainer.top_p=1.0"),
    "trainer.max_grad_norm=null": ("trainer.max_grad_norm=null", "must have a value", "Leave it out"),
    "trainer.importance_sampling_level=tokens": ("=tokens", "is not one of token, sequence", "Did you mean token?"),
    "baseline=rloo trainer.top_entropy_quantile=1.5": ("top_entropy_quantile=1.5", "must be in (0, 1]", "=1.0"),
    "parallel=fsdp2 trainer.accelerator_config.split_batches=true": (
        *("trainer.accelerator_config", "parallel=fsdp2", "Set parallel.trainer.accelerator_config"),
    ),
    "trainer.beta=-0.1": ("trainer.beta=-0.1", "number >= 0", "Try trainer.beta=0"),
    "trainer.betta=0.1": ("trainer.betta", "no option of trl.GRPOConfig", "Did you mean beta?"),
    "trainer.num_generations=8": ("trainer.num_generations=8", "follows from the run's own keys", "set group_size"),
    "trainer.num_generations_eval=8": ("trainer.num_generations_eval=8", "own keys", "set evaluation.samples"),
    "trainer.train_sampling_strategy=sequential": ("train_sampling_strategy=", "follows from seed and epoch"),
    "trainer.length_column_name=tokens": ("trainer.length_column_name=tokens", "follows from seed and epoch"),
    "trainer.label_smoothing_factor=0.1": ("trainer.label_smoothing_factor=0.1", "has no labels"),
    "trainer.trust_remote_code=true": ("trainer.trust_remote_code=True", "without code of its own"),
    "trainer.save_total_limit=5": ("trainer.save_total_limit=5", "the last checkpoint and the best are kept"),
    "trainer.auto_find_batch_size=true": ("trainer.auto_find_batch_size=True", "set model.rollouts_per_forward"),
    "trainer.use_transformers_continuous_batching=true model.dtype=bfloat16": (
        *("continuous_batching=true with model.dtype=bfloat16", "round the weights that are trained"),
        "Use rollouts_by=vllm, or model.dtype=float32",
    ),
    "trainer.use_transformers_paged=true model.dtype=bfloat16": ("paged=true with", "Use rollouts_by=vllm, or model"),
    "trainer.loss_type=dappo": ("trainer.loss_type=dappo", "is not one of", "Did you mean dapo?"),
    "trainer.loss_type=vespo": ("trainer.loss_type=vespo", "otb has one per token", "Use trainer.loss_type=dr_grpo"),
    "trainer.report_to=wanddb": ("trainer.report_to=wanddb", "is not one of", "Did you mean wandb?"),
    "baseline.tial=own": ("baseline.tial", "no argument of otb.baselines.otb.otb", "Did you mean tail?"),
    "baseline.tail=owm": ("baseline.tail=owm", "is not one of zero, own, carry", "Did you mean own?"),
    "baseline=energy_probe baseline.decay=2": ("baseline.decay=2", "must be in [0, 1]", "Try baseline.decay=0.9"),
    "baseline=energy_probe baseline.decai=0.5": ("baseline.decai", "no argument of", "Did you mean decay?"),
    "baseline=energy_probe baseline.group_correction=yess": ("group_correction=yess", "true or false", "Try "),
    "baseline=trajectory_cv baseline.pseudo_rollouts=0": (
        "pseudo_rollouts=0",
        "must be above 0",
        "Try ",
    ),
    "baseline=energy_probe baseline.decay=abc": ("decay=abc", "must be a number", "Try baseline.decay=0.9"),
    "baseline=otb +baseline.eps=null": ("baseline.eps=null", "must be a number", "Try baseline.eps=1e-08"),
    "baseline=value baseline.epochs=2.5": ("epochs=2.5", "a whole number", "Try baseline.epochs=10"),
    "baseline=value baseline.epochs=0": ("baseline.epochs=0", "whole number >= 1", "Try baseline.epochs=10"),
    "baseline=damped_probe group_size=1": ("group_size=1", "needs at least 2", "works with one rollout"),
    "baseline=otb_loo baseline.tail=own": ("baseline.tail=own", "is not one of carry, zero", ""),
    "baseline=value baseline._partial_=true": ("Value is a class", "built at once", "Use baseline._partial_=false"),
    "baseline=otb baseline._partial_=false": ("otb is a function", "wait for their rollouts", "_partial_=true"),
    "baseline._target_=no.such.thing": ("no.such.thing", "cannot be imported", "No module named"),
    "task.train_prompt=8": ("task.train_prompt", "no argument of", "Did you mean train_prompts?"),
    "task.train_prompts=0": ("task.train_prompts=0", "must be 1 to", "Try task.train_prompts=128"),
    "task.train_prompts=many": ("train_prompts=many", "a whole number", "Try task.train_prompts=2048"),
    "task=gsm8k task.revision=12": ("task.revision=12", "must be text or null", "Try 'task.revision=\"12\"'"),
    "task=gsm8k task.path=null": ("path=null", "no hub id", "Try task.path=FOLDER"),
    "task=math500": ("task math500 has train_split=null", "rows are for evaluation", "Try task=gsm8k"),
    "task=gsm8k task.path=/nowhere/gsm8k": ("path='/nowhere/gsm8k'", "does not exist", "A path is a local file"),
    "HF_HUB_OFFLINE=1 task=gsm8k": (
        "path='openai/gsm8k'",
        "HF_HUB_OFFLINE is set and it is not in the cache",
        "Run `python experiments/prefetch.py --dataset openai/gsm8k --config main",
    ),
    "HF_HUB_OFFLINE=1 evaluation.tasks=[math500]": (
        "evaluation.tasks, math500: path='HuggingFaceH4/MATH-500'",
        "it is not in the cache",
        "python experiments/prefetch.py --dataset HuggingFaceH4/MATH-500",
    ),
    "HF_HUB_OFFLINE=1 model=hub model.name=some/model model.revision=v2": (
        "model.name=some/model",
        "not in the cache and HF_HUB_OFFLINE is set",
        "python experiments/prefetch.py --model some/model --revision v2",
    ),
    "model.name=docs": ("model.name=docs", "it has no config.json", "files that save_pretrained writes"),
    "model.dtype=float16": ("model.dtype=float16", "is not one of float32, bfloat16", "Try model.dtype=float32"),
    "model.lora.rank=4": ("model.lora.rank", "no field of peft.LoraConfig", "The usual ones: r, "),
    "model.lora.lora_alfa=4": ("model.lora.lora_alfa", "no field of peft.LoraConfig", "Did you mean lora_alpha?"),
    "model.lora.lora_alpha=32": ("model.lora.lora_alpha", "set without a rank", "Add model.lora.r=16"),
    "model.lora.r=0": ("model.lora.r=0", "at least 1", "Try model.lora.r=16"),
    "token_weights=arca": ("token_weights=arca", "there is no adapter", "Use model.lora.r=16"),
    "token_weights.power=2": ("token_weights.power=2", "takes no options", "Add token_weights=arca"),
    "token_weights=surprisal token_weights.power=0": ("power=0", "must be above 0", "Try token_weights.power=1"),
    "improvement=pipo auxiliary=mtp_ce": (
        "improvement=pipo",
        "has not been worked out",
        "Use improvement=none, or auxiliary=none",
    ),
    "auxiliary=mtp auxiliary.mode=ocd": ("auxiliary.mode=ocd", "is not one of detach, ce", "Did you mean occ?"),
    "auxiliary=mtp auxiliary.mode=ce auxiliary.weight=0": ("weight=0", "above 0", "Try auxiliary.weight=0.1"),
    "auxiliary=mtp_ce auxiliary.weights=shiped": ("weights=shiped", "is not one of fresh", "Did you mean shipped?"),
    "auxiliary=mtp_ce auxiliary.weights=shipped": ("weights=shipped", "tiny policy ships no head", "weights=fresh"),
    "auxiliary=mtp auxiliary.mode=ce auxiliary.warmup=80": ("warmup=80", "never act", "Use a smaller"),
    "auxiliary=mtp auxiliary.mode=ce model.lora.r=4": ("LoRA", "has not been tested", "Use no model.lora, or"),
    "rollouts_by.tensor_parallel=2": ("tensor_parallel=2", "rollouts_by=hf would ignore it", "Add rollouts_by=vllm,"),
    "+rollouts_by.sleep=true": ("rollouts_by.sleep=true", "rollouts_by=hf would ignore it", "Add rollouts_by=vllm,"),
    "rollouts_by=hf_bfloat16 rollouts_by.url=here": ("url=here", "would ignore it", "Add rollouts_by=vllm_server,"),
    "+rollouts_by.roows=3": ("rollouts_by.roows", "no key of rollouts_by=hf.", "Did you mean rows?"),
    "rollouts_by.name=vllm": ("rollouts_by.name=vllm", "no more than a name", "Use rollouts_by=vllm."),
    "parallel.fsdp=true": ("parallel.fsdp", "no key of parallel=ddp", "Keys: trainer."),
    "parallel.trainer.fsdp=true": ("parallel.trainer.fsdp=true", "parallel=ddp would not", "Use parallel=fsdp2,"),
    "parallel.trainer.fsdpp=true": ("parallel.trainer.fsdpp", "no option of trl.GRPOConfig", "Did you mean fsdp?"),
    "parallel.trainer.deepspeed=x.json": ("deepspeed=x.json", "parallel=ddp would not", "Use parallel=zero3,"),
    "parallel.trainer.learning_rate=1": ("parallel.trainer.learning_rate=1", "follows from", "set learning_rate"),
    "gpus=2 trainer.use_cpu=true parallel.trainer.fsdp_config.version=2": ("'version': 2", "ddp would", "fsdp2,"),
    "gpus=2 trainer.use_cpu=true parallel=fsdp2 parallel.trainer.fsdp=false": ("fsdp=false", "whole policy", "=ddp."),
    "gpus=2 trainer.use_cpu=true parallel=zero3 parallel.trainer.deepspeed=null": ("=null", "whole policy", "=ddp."),
    "gpus=2 trainer.use_cpu=true parallel=fsdp2 +parallel.trainer.fsdp_config.reshard=true": (
        "fsdp_config.reshard",
        "no key that FSDP2 reads",
        "Keys: activation_checkpointing, ",
    ),
    "model=hub model.name=. model.revision=v1": ("model.revision=v1", "model.name=. is a folder", "Leave it out"),
    "model.revison=v1": ("model.revison", "no key of a model", "Did you mean revision?"),
    "model.revision=v1": ("model.revision=v1 would be ignored", "tiny is built here", "Leave it out"),
    "model.chat_template=plain": ("model.chat_template=plain would be ignored", "tiny is built here", "Leave it out"),
    "model=hub model.name=a/b model.chat_template=/no.jinja": ("chat_template=/no.jinja", "is no file", "Give a jinja"),
    "model.attn_implementation=eagerr": ("attn_implementation=eagerr", "is not one of eager, ", "Did you mean eager?"),
    "model.warm_start.stps=9": ("model.warm_start.stps", "no field of WarmStart", "Did you mean steps?"),
}

if importlib.util.find_spec("trackio") is None:
    needs = "needs the package trackio"
    SETTINGS["trainer.report_to=trackio"] = ("trainer.report_to=trackio", needs, "Run: pip install trackio")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("logs") / "log"


def assert_refused(code: int, printed: str, said: tuple[str, ...]) -> None:
    assert code == REFUSED, printed
    before, error, _ = printed.partition("error: ")
    assert error and re.fullmatch(r"(run directory: .*\n)?", before) and "Traceback" not in printed
    for part in said:
        assert part in printed
    assert len(printed) < 800


def split(given: str) -> tuple[list[str], dict[str, str]]:
    """'WORLD_SIZE=2 a=1 -m' -> arguments, environment: variables are in capitals."""
    words = given.split()
    variables = [word for word in words if word.partition("=")[0].isupper()]
    return [word for word in words if word not in variables], dict(word.split("=", 1) for word in variables)


@pytest.mark.parametrize("given", SETTINGS)
def test_settings_that_make_no_sense_are_refused(given, tmp_path, log):
    arguments, environment = split(given)
    code, printed = commands.run([*arguments, f"runs_dir={tmp_path / 'runs'}"], log, **environment)
    assert_refused(code, printed, SETTINGS[given])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "given",
    [
        "baseline=ottb",
        "-m baseline=otb,ottb",
        "group_size=0",
        "trainer.top_p=0.9",
        "+rollouts_by.sleep=true",
        "baseline.tial=own",
        "task.train_prompts=0",
        "WORLD_SIZE=2 prompts_per_step=3 group_size=1",
        "task=math500",
        "task=gsm8k task.path=/nowhere/gsm8k",
        "HF_HUB_OFFLINE=1 task=gsm8k",
        "HF_HUB_OFFLINE=1 evaluation.tasks=[math500]",
        "HF_HUB_OFFLINE=1 model=hub model.name=some/model model.revision=v2",
        "model.name=docs",
    ],
)
def test_the_command_as_typed_refuses_before_it_imports_anything_heavy(given, tmp_path):
    arguments, environment = split(given)
    done = commands.run_light([*arguments, f"runs_dir={tmp_path}"], **environment)
    assert_refused(done.returncode, done.stderr, SETTINGS[given])
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("gpus=4", "gpus=4 asks for more GPUs than are visible here (2). Use gpus=2"),
        ("task=gsm8k task.path=/nowhere", "path='/nowhere' does not exist"),
        ("task=gsm8k HF_HUB_OFFLINE=1", "python experiments/prefetch.py --dataset openai/gsm8k"),
    ],
)
def test_a_sweep_here_is_refused_as_a_lone_run_before_any_of_its_runs_starts(given, said, tmp_path):
    arguments, environment = split(given)
    arguments += ["-m", "seed=0,1", f"runs_dir={tmp_path}", "sweep=mine"]
    done = commands.run_light(arguments, CUDA_VISIBLE_DEVICES="0,1", **environment)
    assert done.returncode == REFUSED and said in done.stderr
    assert done.stderr.endswith(" The other 1 runs are refused, too.\n")
    assert not list((tmp_path / "mine").glob("job-*.json"))


@pytest.mark.parametrize(("revision", "refused"), [("v1", False), ("v2", True), (None, True)])
@pytest.mark.parametrize("file", ["config.json", "adapter_config.json"])
def test_a_model_that_is_cached_is_not_refused_offline(file, revision, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--someone--model"
    for part in ("snapshots/1a2b", "refs"):
        (folder / part).mkdir(parents=True)
    (folder / "refs" / "v1").write_text("1a2b")
    (folder / "snapshots" / "1a2b" / file).write_text("{}")
    cfg = composed("model=hub", "model.name=someone/model", f"model.revision={revision or 'null'}")
    if not refused:
        return check_model_is_here(cfg)
    with pytest.raises(RunError, match="model.name=someone/model is not a folder.* not in the cache"):
        check_model_is_here(cfg)


def test_attention_is_chosen_among_what_transformers_knows():
    needs_a_paged_cache = "paged|eager"
    known = {name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "/" not in name}
    assert {*ATTENTION, needs_a_paged_cache} == {"eager", *known}


@pytest.mark.parametrize(
    ("given", "package"),
    [
        ("flash_attention_2", "needs the package flash-attn. Run: pip install flash-attn --no-build-isolation, or"),
        ("flash_attention_3", "needs the package flash-attn-3. Run: pip install flash-attn-3, or"),
        ("flash_attention_4", "needs the package flash-attn-4. Run: pip install flash-attn-4, or"),
        ("kernels-community/flash-attn2", "needs the package kernels. Run: pip install kernels, or"),
    ],
)
def test_attention_is_refused_for_the_lack_of_its_package_alone(given, package, monkeypatch):
    cfg = composed("model=hub", "model.name=OWNER/NAME", f"model.attn_implementation={given}")
    installed = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RunError, match=re.escape(f"model.attn_implementation={given} {package}")):
        check_model(cfg)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: installed(name) or installed("json"))
    check_model(cfg)


@pytest.mark.parametrize("value", [1, 0.5, 1e-8])
def test_a_number_of_any_kind_is_taken_where_a_float_is_annotated(value):
    node = OmegaConf.create({"_target_": "otb.baselines.otb.otb", "_partial_": True, "eps": value})
    assert check_target("baseline", node) is otb


def test_one_process_is_counted_in_the_singular():
    assert [counted(number) for number in (1, 2)] == ["1 process", "2 processes"]


# ---- data and models


@pytest.fixture(scope="module")
def unreadable_weights(policy, tmp_path_factory):
    """A policy whose tokenizer and configuration are fine and whose weights are no weights."""
    folder = tmp_path_factory.mktemp("broken") / "policy"
    shutil.copytree(policy, folder)
    (folder / "model.safetensors").write_bytes(b"not weights")
    return folder


@pytest.fixture
def dataset(tmp_path):
    """write(train_rows) -> the arguments that name this dataset."""

    def write(rows: list[dict]) -> list[str]:
        folder = tmp_path / "data"
        folder.mkdir()
        for split_name, content in (("train", rows), ("test", [{"question": "7 + 7?", "answer": "#### 14"}])):
            (folder / f"{split_name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
        return ["task=gsm8k", f"task.path={folder}", "task.max_completion_length=8", "prompts_per_step=2"]

    return write


GOOD = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(4)]
DATA = {
    "missing column": (
        [{"problem": "1 + 1?", "answer": "#### 2"}],
        [],
        ("Column 'question'", "found: answer, problem", "Set task.question_column"),
    ),
    "no rows": ([], [], ("train.jsonl", "empty", "at least one row")),
    "rows without an answer": (
        [*GOOD, {"question": "2 + 2?", "answer": ""}],
        [],
        ("1 of 5 rows", "each row needs both", "Try task.drop_unanswered=true"),
    ),
    "fewer rows than a step takes": (
        GOOD[:1],
        [],
        ("prompts_per_step=2", "more than the 1 training prompts", "Try prompts_per_step=1"),
    ),
    "prompts longer than the limit": (
        GOOD,
        ["max_prompt_length=20"],
        ("4 prompts", "longer than 20 tokens (max_prompt_length)", "Try max_prompt_length="),
    ),
    "prompts longer than the model's context": (
        [{"question": "1 + " * 4200 + "1?", "answer": "#### 4201"}, *GOOD],
        [],
        ("1 prompts", "longer than 4088 tokens (the model's context", "Lower task.max_completion_length"),
    ),
    "responses longer than the model's context": (
        GOOD,
        ["task.max_completion_length=5000"],
        ("task.max_completion_length=5000", "context of 4096", "Try task.max_completion_length=2048"),
    ),
    "a LoRA target that matches nothing": (
        GOOD,
        ["model.lora.r=4", "model.lora.target_modules=[q_proj,vproj]"],
        ("target_modules=vproj", "matches no linear module", "Found: down_proj, "),
    ),
    "a learning rate schedule that does not exist": (
        GOOD,
        ["trainer.lr_scheduler_type=cosin"],
        ("trainer: ", "cosin", "not a valid SchedulerType, please select one of"),
    ),
    "weights that cannot be read": (GOOD, [], ("model.name=", "cannot be read", "files that save_pretrained writes")),
}


@pytest.mark.parametrize("case", DATA)
def test_data_that_cannot_be_used_are_refused_before_the_model_loads(case, dataset, unreadable_weights, tmp_path, log):
    rows, changed, said = DATA[case]
    given = [*dataset(rows), f"model.name={unreadable_weights}", *changed, f"runs_dir={tmp_path / 'runs'}"]
    code, printed = commands.run(given, log)
    assert_refused(code, printed, said)


def test_a_finished_run_does_not_need_its_rows(dataset, policy, tmp_path, log):
    given = [*dataset(GOOD), f"model.name={policy}", f"runs_dir={tmp_path / 'runs'}"]
    given += ["steps=1", "group_size=2", "evaluation.samples=1"]
    code, printed = commands.run(given, log)
    assert code == 0, printed
    shutil.rmtree(tmp_path / "data")
    assert "finished at step 1, nothing to do" in commands.run(given, log)[1]
    with initialize_config_dir(str(commands.ROOT / "conf"), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        runs = [accept_open_keys([*given, f"seed={seed}"]) for seed in (0, 1)]
        finished, new = plan(loader, loader.load_configuration("config", [], RunMode.MULTIRUN), runs, 1, here=True)
    assert finished.error is None and f"path='{tmp_path / 'data'}' does not exist" in new.error


def test_a_tokenizer_without_a_chat_template_is_refused(unreadable_weights, tmp_path, log):
    folder = tmp_path / "policy"
    shutil.copytree(unreadable_weights, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    code, printed = commands.run([f"model.name={folder}", f"runs_dir={tmp_path / 'runs'}"], log)
    assert_refused(code, printed, (f"model.name={folder}", "without a chat template", "model.chat_template=plain"))


def test_a_folder_whose_files_are_no_model_is_refused(tmp_path, log):
    (tmp_path / "config.json").write_text('{"model_type": "no such", "hidden_size": 8}')
    code, printed = commands.run([f"model.name={tmp_path}", f"runs_dir={tmp_path / 'runs'}"], log)
    assert_refused(code, printed, (f"model.name={tmp_path}", "cannot be read", "files that save_pretrained writes"))


def test_nothing_is_warm_started_for_a_run_that_is_refused(tmp_path, log):
    given = ["max_prompt_length=3", f"runs_dir={tmp_path / 'runs'}"]
    code, printed = commands.run(given, log, OTB_CACHE=str(tmp_path / "cache"))
    assert_refused(code, printed, ("longer than 3 tokens", "Try max_prompt_length="))
    assert not (tmp_path / "cache").exists()
