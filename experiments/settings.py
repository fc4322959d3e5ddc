"""Configuration without torch: what the command line accepts, what it refuses, and where a run lives.

Every refusal is a RunError with the value, the rule and the fix, within two seconds: nothing here imports torch,
transformers or trl. Called by experiments/run.py before the first heavy import.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import math
import os
import re
import typing
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from otb import baselines
from otb.errors import RunError
from otb.options import NEUTRAL_SAMPLING, refuse_options
from otb.records import WHERE_AND_HOW, is_one_of
from otb.sandbox import Sandbox, SandboxFailure

CONF = Path(__file__).resolve().parent.parent / "conf"
GROUPS = ("baseline", "task", "model", "sandbox", "trainer", "experiment")
DTYPES = ("float32", "bfloat16")  # float16 weights cannot be trained: their gradients cannot be unscaled
TRACKERS = ("tensorboard", "wandb", "trackio")
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")  # TRL refuses at its first step
NON_NEGATIVE = ("beta", "weight_decay", "max_grad_norm", "warmup_steps", "epsilon", "epsilon_high", "delta", "top_k")
NON_NEGATIVE += ("min_p", "repetition_penalty", "adam_beta1", "adam_beta2", "adam_epsilon", "entropy_coef")
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


# ---- before Hydra: the command line


def accept_open_keys(arguments: list[str]) -> list[str]:
    """`trainer.KEY=V`, `baseline.KEY=V`, ... need no `+`: `check` knows the target's keys and suggests a near miss.

    `-m` may stand anywhere; Hydra reads it only before or after all the others.
    """
    arguments = sorted(arguments, key=lambda argument: argument not in ("-m", "--multirun"))
    opened = re.compile(r"(trainer|baseline|task|model\.lora|model\.warm_start)\.[A-Za-z_]")
    return [f"++{argument}" if opened.match(argument) else argument for argument in arguments]


def refuse_unknown_choices(arguments: list[str], config_name: str = "config") -> None:
    """Raises RunError for syntax errors, unknown keys and unknown group choices, with the choices and a near miss."""
    config = OmegaConf.to_container(OmegaConf.load(CONF / f"{config_name}.yaml"), resolve=False)
    sections = {name: list(node) for name, node in config.items() if isinstance(node, dict) and name != "hydra"}
    groups = [name for default in config.pop("defaults") if isinstance(default, dict) for name in default]
    keys = [*config, *(group for group in groups if group in GROUPS)]
    for argument in get_args_parser().parse_args(arguments).overrides:  # not the `job` of `--cfg job`
        try:
            override = OverridesParser.create().parse_override(argument)
        except HydraException as error:
            reason = str(error).splitlines()[0]
            raise RunError(
                f"{argument} cannot be read as KEY=VALUE: {reason}. Quote what the shell may take."
            ) from error
        name = override.key_or_group
        top, *rest = re.split(r"[./@]", name)
        if top not in keys:
            raise RunError(f"{name} is no key of this project.{near_miss(top, keys)} Keys: {', '.join(sorted(keys))}.")
        if top in sections and rest and rest[0] not in sections[top]:
            known = sections[top]
            raise RunError(f"{name} is no key of {top}.{near_miss(rest[0], known)} Keys: {', '.join(known)}.")
        if name in GROUPS and not override.is_delete():
            _refuse_unknown_values(name, override)


def _refuse_unknown_values(group: str, override: Override) -> None:
    values = override.sweep_string_iterator() if override.is_choice_sweep() else [override.get_value_string()]
    choices = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    for value in values:
        if value not in (*choices, "null"):
            raise RunError(
                f"{group}={value} is not one of the choices.{near_miss(value, choices)} Choices: {', '.join(choices)}."
            )


def near_miss(value: str, choices) -> str:
    """' Did you mean X?' for the closest choice, or ''."""
    close = difflib.get_close_matches(str(value), list(choices), n=1)
    return f" Did you mean {close[0]}?" if close else ""


# ---- after Hydra: the composed configuration


def check(cfg: DictConfig, processes: int | None = None) -> None:
    """Raises RunError for a configuration that cannot run as written. Reads no dataset and loads no model.

    processes: of the run; None for those that the environment names.
    """
    whole = {"group_size": 1, "prompts_per_step": 1, "steps": 1, "evaluation.samples": 1}
    whole |= {"seed": 0, "evaluation.every": 0, "checkpoint_every": 0, "rollouts.every": 0, "rollouts.groups": 0}
    check_whole_numbers(cfg, whole)
    _check_positive(cfg, "learning_rate", "1e-6")
    for key in ("log_energy", "measure_gradient_noise", "deterministic", "overwrite"):
        check_true_or_false(cfg, key)
    check_policy_and_task(cfg)
    _check_trainer(cfg)
    _check_baseline(cfg)
    _check_batches(cfg, processes or int(os.environ.get("WORLD_SIZE", 1)))


def check_whole_numbers(cfg: DictConfig, smallest: dict[str, int]) -> None:
    """Raises RunError unless each key is a whole number of at least what is given."""
    for key, least in smallest.items():
        value = OmegaConf.select(cfg, key)
        if type(value) is not int or value < least:
            raise RunError(f"{key}={value} must be a whole number >= {least}. Try {key}={max(least, 1)}.")


def check_true_or_false(cfg: DictConfig, key: str) -> None:
    if not isinstance(cfg[key], bool):
        raise RunError(f"{key}={cfg[key]} must be true or false. Try {key}=false.")


def check_policy_and_task(cfg: DictConfig) -> None:
    """What a run and a measurement have in common: temperature, task, sandbox, model. Raises RunError."""
    _check_positive(cfg, "temperature", "1.0")
    if cfg.max_prompt_length is not None and (type(cfg.max_prompt_length) is not int or cfg.max_prompt_length < 1):
        raise RunError(
            f"max_prompt_length={cfg.max_prompt_length} must be a whole number >= 1, or null for the model's limit. "
            "Try max_prompt_length=null."
        )
    _check_target("task", cfg.task)
    if build(cfg, "task").environment is not None:
        _check_sandbox(cfg)
    _check_model(cfg)


def _check_positive(cfg: DictConfig, key: str, example: str) -> None:
    value = cfg[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise RunError(f"{key}={value} must be a positive number. Try {key}={example}.")


def build(cfg: DictConfig, group: str):
    """The task, baseline or sandbox that `cfg` names. Raises RunError with what its constructor says, in its words."""
    try:
        return instantiate(cfg[group], _convert_="object")
    except InstantiationException as error:
        cause = error.__cause__ or error
        reason = str(cause).splitlines()[0]
        if not isinstance(cause, ValueError):
            raise RunError(f"{group}: {type(cause).__name__}: {reason}") from error
        keys = "|".join(re.escape(str(key)) for key in cfg[group])
        raise RunError(re.sub(rf"(?<![\w.])({keys})=", rf"{group}.\1=", reason)) from error  # as it is typed


@contextmanager
def opened_sandbox(cfg: DictConfig) -> Iterator[Sandbox | None]:
    """The sandbox of a task with tools, tried; None for another task. Raises RunError where it cannot be trusted."""
    if build(cfg, "task").environment is None:
        yield None
        return
    with closing(build(cfg, "sandbox")) as sandbox:
        try:
            sandbox.check()
        except SandboxFailure as error:
            raise RunError(f"sandbox: {error}") from error
        yield sandbox


def trackers(cfg: DictConfig) -> list[str]:
    """The names in `trainer.report_to`, which may be one name, a list, or none."""
    names = cfg.trainer.get("report_to") or "none"
    return [name for name in ([names] if isinstance(names, str) else names) if name != "none"]


def _check_trackers(cfg: DictConfig) -> None:
    for name in trackers(cfg):
        if name not in TRACKERS:
            raise RunError(
                f"trainer.report_to={name} is not one of {', '.join(TRACKERS)}, none.{near_miss(name, TRACKERS)}"
            )
        if importlib.util.find_spec(name) is None:
            raise RunError(f"trainer.report_to={name} needs the package {name}. Run: pip install {name}")


def _check_sandbox(cfg: DictConfig) -> None:
    for key in cfg.sandbox:
        if OmegaConf.is_missing(cfg.sandbox, key):
            raise RunError(f"sandbox.{key} is not set, and this sandbox needs it. Try sandbox.{key}=VALUE.")
    _check_target("sandbox", cfg.sandbox)
    build(cfg, "sandbox")


def _check_model(cfg: DictConfig) -> None:
    if cfg.model.dtype not in DTYPES:
        raise RunError(f"model.dtype={cfg.model.dtype} is not one of {', '.join(DTYPES)}. Try model.dtype=float32.")
    name = str(cfg.model.name)
    if name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().is_dir():
        raise RunError(f"model.name={name} is not a folder. Give a folder of transformers files, a hub id or tiny.")
    known = known_models()
    if name not in known and near_miss(name, known) and not Path(name).is_dir() and "/" not in name:
        raise RunError(f"model.name={name} is no folder and no hub id (OWNER/NAME).{near_miss(name, known)}")
    recipe = dataclass_fields("otb.policies.warm_start", "WarmStart")
    for key in cfg.model.get("warm_start") or {}:
        if key not in recipe:
            known = ", ".join(sorted(recipe))
            raise RunError(f"model.warm_start.{key} is no field of WarmStart.{near_miss(key, recipe)} Fields: {known}.")
    lora = cfg.model.get("lora") or {}
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
    _check_trackers(cfg)
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
        build(cfg, "baseline")  # its constructor has a say
    try:
        needs_scores = cfg.log_energy or cfg.measure_gradient_noise or baselines.needs_scores(baseline)
        refuse_options(SimpleNamespace(**(options | dict(cfg.trainer))), baseline, needs_scores)
    except ValueError as error:
        raise RunError(str(error).replace("num_generations=", "group_size=")) from error


def _check_target(group: str, node: DictConfig):
    """The function or class that `node` names, its arguments known and of the values their annotations allow."""
    target = str(node.get("_target_"))
    try:
        module, _, name = target.rpartition(".")
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever importing a user's module raises
        raise RunError(f"{group}._target_={target} cannot be imported: {error}") from error
    parameters = inspect.signature(found).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return found
    own = [name for name in parameters if name != "rollouts"]
    for key, value in node.items():
        if key.startswith("_"):
            continue
        if key not in own:
            has = f"Its arguments: {', '.join(own)}." if own else "It takes none."
            raise RunError(f"{group}.{key} is no argument of {target}.{near_miss(key, own)} {has}")
        choices = literal_choices(found, key)
        if choices and value not in choices:
            raise RunError(f"{group}.{key}={value} is not one of {', '.join(choices)}.{near_miss(value, choices)}")
    return found


def _check_batches(cfg: DictConfig, processes: int) -> None:
    rollouts = cfg.prompts_per_step * cfg.group_size
    if rollouts % processes:
        fit = processes // math.gcd(processes, cfg.group_size)
        raise RunError(
            f"prompts_per_step={cfg.prompts_per_step} x group_size={cfg.group_size} = {rollouts} rollouts do not "
            f"divide over {processes} processes. Try prompts_per_step={max(fit, cfg.prompts_per_step // fit * fit)}."
        )
    local, forward = rollouts // processes, cfg.model.rollouts_per_forward
    if forward is not None and (type(forward) is not int or forward < 1 or (forward < local and local % forward)):
        divisors = [d for d in range(1, local + 1) if local % d == 0]
        fit = max((d for d in divisors if d <= max(1, forward if type(forward) is int else 1)), default=1)
        raise RunError(
            f"model.rollouts_per_forward={forward} must divide the {local} rollouts of a process. "
            f"Try model.rollouts_per_forward={fit}."
        )
    if cfg.measure_gradient_noise:
        _check_micro_batches(cfg, local, min(forward or local, local), processes)
    cycle = cfg.trainer.get("num_iterations", 1)
    if type(cycle) is not int or cycle < 1:
        raise RunError(f"trainer.num_iterations={cycle} must be a whole number of at least 1.")
    if cfg.steps % cycle:
        raise RunError(
            f"steps={cfg.steps} must be a multiple of trainer.num_iterations={cycle}: the last checkpoint falls on a "
            f"generation. Try steps={max(1, cfg.steps // cycle) * cycle}."
        )


def _check_micro_batches(cfg: DictConfig, local: int, forward: int, processes: int) -> None:
    """Gradient noise is measured on two micro-batches of whole prompt groups, or more."""
    if forward % cfg.group_size == 0 and local // forward * processes > 1:
        return
    groups = local // cfg.group_size  # whole ones of a process
    fits = [k * cfg.group_size for k in range(1, groups // 2 + 1) if local % (k * cfg.group_size) == 0]
    fix = f"model.rollouts_per_forward={fits[-1]}" if fits else f"prompts_per_step={4 * processes}"
    raise RunError(
        f"measure_gradient_noise=true compares micro-batches of whole prompt groups; a step has "
        f"{local // forward * processes} of {forward} rollouts in groups of {cfg.group_size}. Try {fix}."
    )


def literal_choices(function, argument: str) -> tuple[str, ...]:
    """The values of an argument annotated as typing.Literal; () for any other."""
    annotation = inspect.signature(function).parameters[argument].annotation
    if isinstance(annotation, str):  # from __future__ import annotations
        if not annotation.startswith("Literal["):
            return ()
        annotation = eval(annotation, {"Literal": typing.Literal})  # an annotation of the imported module
    return typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()


@cache
def known_models() -> tuple[str, ...]:
    """What model.name is in the yamls."""
    return ("tiny", *sorted(str(OmegaConf.load(path).name) for path in (CONF / "model").glob("*.yaml")))


@cache
def trainer_fields() -> frozenset[str]:
    """Every option of trl.GRPOConfig, read from the sources: importing it would import torch."""
    modules = {
        "trl.trainer.grpo_config": "GRPOConfig",
        "trl.trainer.base_config": "_BaseConfig",
        "transformers.training_args": "TrainingArguments",
    }
    return frozenset().union(*(dataclass_fields(module, name) for module, name in modules.items()))


@cache
def dataclass_fields(module: str, name: str) -> frozenset[str]:
    """Annotated fields of a class, from its source file, without importing the package."""
    package, _, rest = module.partition(".")
    root = Path(importlib.util.find_spec(package).origin).parent
    tree = ast.parse((root / (rest.replace(".", "/") + ".py")).read_text(encoding="utf8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return frozenset(item.target.id for item in node.body if isinstance(item, ast.AnnAssign))
    raise LookupError(f"{module} has no class {name}; the pinned versions in pyproject.toml have.")


# ---- where a run lives, and what identifies it


def run_path(cfg: DictConfig, overrides: list[str], choices: dict[str, str]) -> Path:
    """runs_dir/TASK-MODEL/BASELINE-nG-seedS[-key=value...]: from the keys that define the experiment.

    overrides: the command line's task overrides; choices: Hydra's runtime choices per group.
    """
    named = {"baseline", "group_size", "seed", "task", "model"}
    extra = []
    for override in sorted(override.lstrip("+") for override in overrides):
        key = override.split("=", 1)[0]
        if key not in named and not is_one_of(key, WHERE_AND_HOW):
            extra.append(override)
    suffix = "".join("-" + re.sub(r"[^\w=.,+-]+", "_", override).strip("_") for override in extra)
    if len(suffix) > 120:  # file systems end at 255 bytes; the digest keeps long names apart
        suffix = suffix[:100] + "-" + hashlib.sha256(suffix.encode()).hexdigest()[:10]
    name = short_name(cfg, choices) + suffix
    return Path(cfg.runs_dir).expanduser() / f"{choices['task']}-{choices['model']}" / name


def short_name(cfg: DictConfig, choices: dict[str, str]) -> str:
    """BASELINE-nG-seedS: how a run's directory begins."""
    return f"{choices['baseline']}-n{cfg.group_size}-seed{cfg.seed}"


def identity(config: dict) -> dict[str, object]:
    """The flat `key.sub: value` pairs that two runs of one experiment share."""
    flat: dict[str, object] = {}

    def walk(prefix: str, node) -> None:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                walk(f"{prefix}.{key}" if prefix else str(key), value)
        else:
            flat[prefix] = node

    walk("", config)
    return {key: value for key, value in flat.items() if not is_one_of(key, WHERE_AND_HOW)}


def difference(old: dict, new: dict) -> list[str]:
    """`key: old -> new` for every identifying key that differs."""
    before, after = identity(old), identity(new)
    absent = "(absent)"
    return [
        f"{key}: {before.get(key, absent)} -> {after.get(key, absent)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key, absent) != after.get(key, absent)
    ]
