"""Checks of a composed configuration, before anything heavy is imported: a refusal answers in a third of a second.

Importing torch takes 3 s and TRL 8 s, and neither a wrong key on a login node nor one in 200 runs of a sweep should
cost that. This is why everything that reads a configuration does without them: types of tensors stand under
TYPE_CHECKING, baselines import torch inside their functions, the options of GRPOConfig are read from its source file
(fields.py), and run.py imports train.py last. tests/test_architecture.py lists the modules that must stay light.

Called by experiments/run.py, experiments/variance.py, and for every run of a sweep by experiments/sweeps/plan.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

from omegaconf import DictConfig, ListConfig, OmegaConf

from experiments import trackers
from experiments.build import build
from experiments.command_line import CONF, near_miss
from experiments.fields import dataclass_fields, literal_choices, trainer_fields
from experiments.hardware import check_gpus, check_processes, check_this_machine
from experiments.held_out import check_held_out
from experiments.planning.fit import check_card
from experiments.threads import SMALL
from otb import baselines
from otb.errors import RunError
from otb.options import NEUTRAL_SAMPLING, batches, refuse_broken_groups, refuse_options

DTYPES = ("float32", "bfloat16")  # float16 weights cannot be trained: their gradients cannot be unscaled
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")  # TRL refuses at its first step
SMALLEST = {  # of the keys that are whole numbers
    "group_size": 1,
    "prompts_per_step": 1,
    "steps": 1,
    "evaluation.samples": 1,
    "seed": 0,
    "evaluation.every": 0,
    "checkpoint_every": 0,
    "rollouts.every": 0,
    "rollouts.groups": 0,
}
NON_NEGATIVE = (  # keys of trainer
    "beta",
    "weight_decay",
    "max_grad_norm",
    "warmup_steps",
    "epsilon",
    "epsilon_high",
    "delta",
    "top_k",
    "min_p",
    "repetition_penalty",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "entropy_coef",
)
# GRPOConfig keys that follow from the run's own keys, and what to set instead.
DERIVED = {
    "num_generations": "group_size",
    "per_device_train_batch_size": "model.rollouts_per_forward",
    "gradient_accumulation_steps": "model.rollouts_per_forward",
    "generation_batch_size": "prompts_per_step",
    "steps_per_generation": "prompts_per_step",
    "max_steps": "steps",
    "num_train_epochs": "steps",
    "seed": "seed",
    "learning_rate": "learning_rate",
    "temperature": "temperature",
    "max_completion_length": "task.max_completion_length",
    "max_tool_calling_iterations": "task.max_turns",
    "output_dir": "runs_dir",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "fsdp": "parallel",
    "fsdp_config": "parallel",
    "deepspeed": "parallel",
    "use_vllm": "rollouts_by",
    "vllm_mode": "rollouts_by",
    "vllm_tensor_parallel_size": "rollouts_by.tensor_parallel",
    "vllm_gpu_memory_utilization": "rollouts_by.memory_share",
    "vllm_enable_sleep_mode": "rollouts_by.sleep",
    "vllm_max_model_length": "task.max_completion_length",
    "vllm_server_base_url": "rollouts_by.url",
    "vllm_server_host": "rollouts_by.url",
    "vllm_server_port": "rollouts_by.url",
    "vllm_server_timeout": "rollouts_by.timeout_s",
    "model_init_kwargs": "nothing: TRL ignores it for a model that is loaded already; see model.*",
    "ignore_data_skip": "nothing: a resumed run continues where it stopped",
    "resume_from_checkpoint": "nothing: the same command resumes",
    "max_prompt_length": "max_prompt_length",
    "logging_nan_inf_filter": "nothing: a loss that is not finite stops the run",
    "save_only_model": "nothing: the last checkpoint must be one to resume from",
    "scale_rewards": "baseline",
    "save_steps": "checkpoint_every",
    "save_strategy": "checkpoint_every",
    "eval_steps": "evaluation.every",
    "eval_strategy": "evaluation.every",
    "eval_on_start": "nothing: every run is evaluated before its first step",
    "per_device_eval_batch_size": "model.rollouts_per_forward",
    "shuffle_dataset": "nothing: the order of the prompts follows from seed and epoch",
    "data_seed": "seed",
    "logging_steps": "nothing: every step is recorded",
    "logging_strategy": "nothing: every step is recorded",
    "sync_ref_model": "nothing: a moving reference model is not in the checkpoints, so no run could be resumed",
}


def check(cfg: DictConfig, processes: int | None = None) -> None:
    """Raises RunError for a configuration that cannot run as written. Reads no dataset and loads no model.

    processes: how many train the run together, elsewhere; None: this process is one of them, and the environment says
    of how many.
    """
    check_whole_numbers(cfg, SMALLEST)
    check_positive(cfg, "learning_rate", "1e-6")
    for key in ("log_energy", "measure_gradient_noise", "deterministic", "overwrite"):
        check_true_or_false(cfg, key)
    check_policy_and_task(cfg)
    check_held_out(cfg)
    _check_trainer(cfg)
    _check_baseline(cfg)
    _check_band(cfg)
    check_gpus(cfg)
    if processes is None:
        processes = int(os.environ.get("WORLD_SIZE", 1))
        check_this_machine(cfg)
    _check_batches(cfg, processes)
    check_processes(cfg, processes)
    check_card(cfg, processes)


def check_policy_and_task(cfg: DictConfig) -> None:
    """Checks what a run and a measurement have in common: temperature, task, sandbox, model. Raises RunError."""
    check_positive(cfg, "temperature", "1.0")
    if cfg.max_prompt_length is not None and (type(cfg.max_prompt_length) is not int or cfg.max_prompt_length < 1):
        raise RunError(
            f"max_prompt_length={cfg.max_prompt_length} must be a whole number >= 1, or null for the model's limit. "
            "Try max_prompt_length=null."
        )
    check_model_and_task(cfg)
    if build(cfg, "task").environment is not None:
        _check_sandbox(cfg)


def check_model_and_task(cfg: DictConfig) -> None:
    """Checks the keys of these two groups. Raises RunError."""
    _check_target("task", cfg.task)
    build(cfg, "task")  # its constructor may refuse a value
    _check_model(cfg)


# ---- values


def check_whole_numbers(cfg: DictConfig, smallest: dict[str, int]) -> None:
    """Raises RunError unless each key is a whole number of at least its value in `smallest`."""
    for key, least in smallest.items():
        value = OmegaConf.select(cfg, key)
        if type(value) is not int or value < least:
            raise RunError(f"{key}={value} must be a whole number >= {least}. Try {key}={max(least, 1)}.")


def check_true_or_false(cfg: DictConfig, key: str) -> None:
    """Raises RunError unless the key is a bool."""
    if not isinstance(cfg[key], bool):
        raise RunError(f"{key}={cfg[key]} must be true or false. Try {key}=false.")


def check_positive(cfg: DictConfig, key: str, example: str) -> None:
    """Raises RunError unless the key is a positive number. example: a value to try."""
    value = cfg[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise RunError(f"{key}={value} must be a positive number. Try {key}={example}.")


# ---- groups


def _check_sandbox(cfg: DictConfig) -> None:
    for key in cfg.sandbox:
        if OmegaConf.is_missing(cfg.sandbox, key):
            raise RunError(f"sandbox.{key} is not set, and this sandbox needs it. Try sandbox.{key}=VALUE.")
    _check_target("sandbox", cfg.sandbox)
    build(cfg, "sandbox")


def _check_model(cfg: DictConfig) -> None:
    if OmegaConf.is_missing(cfg.model, "name"):
        raise RunError("model.name is not set, and model=hub needs it. Add model.name=OWNER/NAME, or a folder.")
    if cfg.model.dtype not in DTYPES:
        raise RunError(f"model.dtype={cfg.model.dtype} is not one of {', '.join(DTYPES)}. Try model.dtype=float32.")
    name = str(cfg.model.name)
    if name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().is_dir():
        raise RunError(f"model.name={name} is not a folder. Give a folder of transformers files, a hub id or tiny.")
    files = [OmegaConf.load(path) for path in sorted((CONF / "model").glob("*.yaml"))]
    known = ["tiny", *(str(file.name) for file in files if "name" in file and not OmegaConf.is_missing(file, "name"))]
    if name not in known and near_miss(name, known) and not Path(name).is_dir() and "/" not in name:
        raise RunError(f"model.name={name} is no folder and no hub id (OWNER/NAME).{near_miss(name, known)}")
    _check_tiny(cfg)
    _check_gguf(cfg)
    recipe = dataclass_fields("otb.policies.warm_start", "WarmStart")
    for key in cfg.model.get("warm_start") or {}:
        if key not in recipe:
            fields = ", ".join(sorted(recipe))
            raise RunError(
                f"model.warm_start.{key} is no field of WarmStart.{near_miss(key, recipe)} Fields: {fields}."
            )
    _check_lora(cfg.model.get("lora") or {})


def _check_tiny(cfg: DictConfig) -> None:
    """Refuses the tiny policy's settings for a policy that is not of its size: at 3e-4 it would be destroyed."""
    name = str(cfg.model.name)
    if name == "tiny" or "warm_start" not in cfg.model:  # the key of conf/model/tiny.yaml alone
        return
    config = Path(name).expanduser() / "config.json"
    try:
        width = json.loads(config.read_text(encoding="utf8")).get("hidden_size", math.inf)
    except (OSError, ValueError):  # a hub id, or a folder whose problem is told when it is loaded
        width = 0 if config.parent.is_dir() else math.inf
    if width > SMALL:
        raise RunError(
            f"model.name={name} would train with the settings of model=tiny: learning rate {cfg.model.learning_rate}, "
            f"{cfg.model.dtype}. They suit hidden sizes up to {SMALL}. Use model=hub model.name={name}."
        )


def _check_gguf(cfg: DictConfig) -> None:
    name, file = str(cfg.model.name), cfg.model.get("gguf_file")
    folder = Path(name).expanduser()
    files = sorted(path.name for path in folder.glob("*.gguf")) if folder.is_dir() else []
    if file is None:
        if files and not (folder / "config.json").exists():
            raise RunError(
                f"model.name={name} holds no config.json of transformers, but {', '.join(files)}. Add "
                f"model.gguf_file={files[0]}."
            )
        return
    if name == "tiny":
        raise RunError(f"model.gguf_file={file} needs the folder or hub id that it is in. Add model=hub model.name=...")
    if importlib.util.find_spec("gguf") is None:
        raise RunError(f"model.gguf_file={file} needs the package gguf. Run: pip install -e '.[gguf]'")
    if folder.is_dir() and not (folder / str(file)).is_file():
        raise RunError(f"model.gguf_file={file} is not in {name}.{near_miss(file, files)} There: {files}.")


def _check_lora(lora) -> None:
    fields = dataclass_fields("peft.tuners.lora.config", "LoraConfig") | dataclass_fields("peft.config", "PeftConfig")
    for key in lora:
        if key not in fields:
            usual = "The usual ones: r, lora_alpha, lora_dropout, target_modules."
            raise RunError(f"model.lora.{key} is no field of peft.LoraConfig.{near_miss(key, fields)} {usual}")
    if lora and lora.get("r") is None:
        raise RunError(f"model.lora.{next(iter(lora))} is set without a rank. Add model.lora.r=16.")
    if "r" in lora and (type(lora.r) is not int or lora.r < 1):
        raise RunError(f"model.lora.r={lora.r} must be a whole number of at least 1. Try model.lora.r=16.")


def _check_trainer(cfg: DictConfig) -> None:
    fields = trainer_fields()
    for key, value in cfg.trainer.items():
        if key in DERIVED:
            raise RunError(f"trainer.{key}={value} follows from the run's own keys; set {DERIVED[key]} instead.")
        if key not in fields:
            raise RunError(f"trainer.{key} is no option of trl.GRPOConfig.{near_miss(key, fields)}")
    for key in NON_NEGATIVE:
        value = cfg.trainer.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
            raise RunError(f"trainer.{key}={value} must be a number >= 0. Try trainer.{key}=0.")
    loss_type = cfg.trainer.get("loss_type", "dapo")
    if loss_type not in LOSS_TYPES:
        raise RunError(
            f"trainer.loss_type={loss_type} is not one of {', '.join(LOSS_TYPES)}.{near_miss(loss_type, LOSS_TYPES)}"
        )
    trackers.refuse_unknown(cfg)
    top_p = cfg.trainer.get("top_p", 1.0)
    if not isinstance(top_p, int | float) or not 0 < top_p <= 1:
        raise RunError(f"trainer.top_p={top_p} must be in (0, 1]. Try trainer.top_p=1.0.")


def _check_baseline(cfg: DictConfig) -> None:
    baseline = _check_target("baseline", cfg.baseline)
    options = NEUTRAL_SAMPLING | {
        "num_generations": cfg.group_size,
        "multi_objective_aggregation": "sum_then_normalize",
        "off_policy_mask_threshold": None,
        "loss_type": "dr_grpo",
        "generation_kwargs": None,
    }
    if inspect.isclass(baseline) == bool(cfg.baseline.get("_partial_")):
        what, fix = ("class", "false") if inspect.isclass(baseline) else ("function", "true")
        raise RunError(
            f"baseline._target_={cfg.baseline._target_} is a {what}; functions wait for their rollouts and classes are "
            f"built at once. Use baseline._partial_={fix}."
        )
    if inspect.isclass(baseline):
        build(cfg, "baseline")  # its constructor may refuse a value
    try:
        needs_scores = cfg.log_energy or cfg.measure_gradient_noise or baselines.needs_scores(baseline)
        refuse_options(SimpleNamespace(**(options | dict(cfg.trainer))), baseline, needs_scores)
    except ValueError as error:
        raise RunError(str(error).replace("num_generations=", "group_size=")) from error


def _check_target(group: str, node: DictConfig):
    """Returns the function or class that `node` names. Raises RunError for arguments, or values, that it does not take.

    Values are checked where the argument is annotated as Literal; its constructor may refuse others.
    """
    name = str(node.get("_target_"))
    try:
        module, _, attribute = name.rpartition(".")
        target = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever importing a user's module raises
        raise RunError(f"{group}._target_={name} cannot be imported: {error}") from error
    parameters = inspect.signature(target).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return target
    arguments = [argument for argument in parameters if argument != "rollouts"]
    for key, value in node.items():
        if key.startswith("_"):
            continue
        if key not in arguments:
            has = f"Its arguments: {', '.join(arguments)}." if arguments else "It takes none."
            raise RunError(f"{group}.{key} is no argument of {name}.{near_miss(key, arguments)} {has}")
        choices = literal_choices(target, key)
        if choices and value not in choices:
            raise RunError(f"{group}.{key}={value} is not one of {', '.join(choices)}.{near_miss(value, choices)}")
    return target


def _check_band(cfg: DictConfig) -> None:
    band = cfg.geometric_ratio_band
    if band is None:
        return
    numbers = isinstance(band, ListConfig) and len(band) == 2 and all(isinstance(x, int | float) for x in band)
    if not numbers or not 0 <= band[0] < 1 < band[1]:
        raise RunError(
            f"geometric_ratio_band={band} must be two numbers [low, high] around 1, or null. Try "
            "'geometric_ratio_band=[0.99,1.01]'."
        )
    if cfg.rollouts_by.name == "hf":
        raise RunError(
            "geometric_ratio_band compares the policy that trains with a sampler of other numerics, and rollouts_by=hf "
            "samples with the policy itself. Use rollouts_by=vllm, or geometric_ratio_band=null."
        )


def _check_batches(cfg: DictConfig, processes: int) -> None:
    try:
        step = batches(cfg.prompts_per_step, cfg.group_size, processes, cfg.model.rollouts_per_forward)
        if cfg.measure_gradient_noise:
            refuse_broken_groups(step, cfg.group_size, processes)
    except ValueError as error:
        raise RunError(str(error)) from error
    cycle = cfg.trainer.get("num_iterations", 1)
    if type(cycle) is not int or cycle < 1:
        raise RunError(f"trainer.num_iterations={cycle} must be a whole number of at least 1.")
    if cfg.steps % cycle:
        raise RunError(
            f"steps={cfg.steps} must be a multiple of trainer.num_iterations={cycle}: the last checkpoint falls on a "
            f"generation. Try steps={max(1, cfg.steps // cycle) * cycle}."
        )
