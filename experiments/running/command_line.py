"""The command line, before Hydra composes it: what may be typed, what is refused, and with which code a command ends.

experiments/run.py and experiments/variance.py hand their arguments to `run_hydra` inside `exit_codes`.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra._internal.utils import get_args_parser  # private: the only parser that knows Hydra's own options
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from experiments.running.warning_signal import Interrupted
from otb.errors import CRASHED, REFUSED, STOPPED_FROM_KEYBOARD, RunError, first_line

CONF = Path(__file__).resolve().parents[2] / "conf"
CHOICES = ("baseline", "task", "model", "sandbox", "trainer", "parallel", "rollouts_by", "experiment")
GROUPS = (*CHOICES, "auxiliary", "improvement", "schedule", "token_weights")
PATHS = ("checkpoint", "run", "model.name", "output")  # keys whose value may be a folder with = in its name
SWEEP = {"-m", "--multirun"}
TRL_NAMES = {  # what TRL and transformers call a key of this project
    "lr": "learning_rate",
    "num_generations": "group_size",
    "max_steps": "steps",
    "num_train_epochs": "steps",
    "eval_steps": "evaluation.every",
    "save_steps": "checkpoint_every",
    "output_dir": "runs_dir",
    "model_name_or_path": "model.name",
    "per_device_train_batch_size": "prompts_per_step",
}
SAID = "OTB_SAID"  # names a file that the first of the processes of `gpus=N` makes that says why they end


@contextmanager
def exit_codes(after_stop: str) -> Iterator[None]:
    """Ends the process with one message and an exit code of otb/errors.py where a command is refused or interrupted.

    after_stop: what the same command does after Ctrl-C, for the message.
    """
    try:
        with refusals():
            yield
    except Interrupted as interruption:
        say_once(f"{interruption}; the same command goes on")
        sys.exit(interruption.code)
    except KeyboardInterrupt:
        say_once(f"stopped; the same command {after_stop}")
        sys.exit(STOPPED_FROM_KEYBOARD)


@contextmanager
def refusals() -> Iterator[None]:
    """Ends the process with REFUSED and the text of a RunError. Hydra, which calls us, would print a traceback."""
    try:
        yield
    except RunError as error:
        say_once(f"error: {error}")
        sys.exit(REFUSED)


def say_once(text: str) -> None:
    """Prints why a run ends, once, even if `gpus=N` started several processes: torchrun ends the others."""
    if SAID in os.environ:
        try:
            open(os.environ[SAID], "x").close()
        except FileExistsError:
            return
    print(text, file=sys.stderr)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Ends a process of a run of several where the block ends, with the code of its SystemExit. Else does nothing.

    A thread of torch's process groups that nobody joins may abort the interpreter's own end.
    """
    several, code = int(os.environ.get("WORLD_SIZE", 1)) > 1, 0
    try:
        yield
    except SystemExit as end:
        if not several:
            raise
        code = end.code or 0  # such as REFUSED: rows are read after the process group has begun
    if several:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else CRASHED)


def run_hydra(main: Callable[[], None], script: str, arguments: list[str], config_name: str) -> None:
    """Checks the arguments and hands them to `main`, a function that hydra.main decorates. Raises RunError."""
    sys.argv = [script, *accept_open_keys(arguments)]
    refuse_unknown_choices(sys.argv[1:], config_name)
    main()


def accept_open_keys(arguments: list[str]) -> list[str]:
    """Returns the arguments as Hydra takes them.

    `trainer.KEY=V`, `rollouts_by.KEY=V`, ... need no `+`, as checks/ knows the keys there are and suggests a near miss.
    `-m` may stand anywhere; Hydra reads it only before or after all the others. Paths are quoted where they must be.
    """
    several = bool(SWEEP & set(arguments))
    arguments = [quoted(argument, several) for argument in sorted(arguments, key=lambda one: one not in SWEEP)]
    opened = re.compile(r"(trainer|baseline|task|schedule|token_weights|parallel|rollouts_by|model)\.[A-Za-z_]")
    return [f"++{argument}" if opened.match(argument) else argument for argument in arguments]


def quoted(argument: str, several: bool = False) -> str:
    """Quotes the path in `checkpoint=PATH` where Hydra would not read it as text, since names of runs have = in them.

    several: commas separate values, as in a sweep. What Hydra reads stays as typed: a run is named by what was typed.
    """
    key, _, value = argument.partition("=")
    if key.lstrip("+") not in PATHS or not value or _is_text(argument):
        return argument
    if several and "," in value:
        parts = [quoted(f"{key}={part}").partition("=")[2] for part in value.split(",")]
        return f"{key}={','.join(parts)}"
    escaped = value.replace("'", "\\'")
    return f"{key}='{escaped}'"


def _is_text(argument: str) -> bool:
    """Tells whether Hydra reads a text, null, or what each run of a sweep gets."""
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        return False
    return override.is_sweep_override() or isinstance(override.value(), str | None)


def refuse_unknown_choices(arguments: list[str], config_name: str = "config") -> None:
    """Raises RunError for syntax errors, unknown keys and unknown group choices, with the choices and a near miss."""
    config = OmegaConf.to_container(OmegaConf.load(CONF / f"{config_name}.yaml"), resolve=False)
    sections = {name: list(node) for name, node in config.items() if isinstance(node, dict) and name != "hydra"}
    groups = [name for default in config.pop("defaults") if isinstance(default, dict) for name in default]
    keys = [*config, *(group for group in groups if group in GROUPS)]
    for argument in arguments:
        name = argument.lstrip("-").partition("=")[0]
        if argument.startswith("-") and name in keys:
            raise RunError(f"{argument} is no option; keys are written without dashes. Try {name}=VALUE.")
    for argument in get_args_parser().parse_args(arguments).overrides:  # not the `job` of `--cfg job`
        try:
            override = OverridesParser.create().parse_override(argument)
        except HydraException as error:
            reason = first_line(error)
            fix = "Quote what the shell may take." if "=" in argument else f"Write KEY={argument}."
            raise RunError(
                f"{argument} cannot be read as KEY=VALUE: {reason}.{run_key(argument, keys) or f' {fix}'}"
            ) from error
        name = override.key_or_group
        top, *rest = re.split(r"[./@]", name)
        if top not in keys:
            advice = run_key(argument, keys) or nearest_key(name, keys)
            raise RunError(f"{name} is no key of this project.{advice} Keys: {', '.join(sorted(keys))}.")
        if top in sections and rest and rest[0] not in sections[top]:
            known = sections[top]
            raise RunError(f"{name} is no key of {top}.{near_miss(rest[0], known)} Keys: {', '.join(known)}.")
        if name in ("parallel.name", "rollouts_by.name"):
            typed = argument.lstrip("+")
            raise RunError(f"{typed} changes no more than a name. Use {top}={override.get_value_string()}.")
        if override.is_sweep_override() and not SWEEP & set(arguments):
            raise RunError(f"{argument} names several values, one run each. Add -m: python experiments/run.py -m ...")
        if name in GROUPS and not override.is_delete():
            _refuse_unknown_values(name, override)


def _refuse_unknown_values(group: str, override: Override) -> None:
    values = override.sweep_string_iterator() if override.is_choice_sweep() else [override.get_value_string()]
    choices = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    for value in values:
        if value not in (*choices, "null"):
            owned = group == "model" and "/" in value
            advice = f" Try model=hub model.name={value}." if owned else near_miss(value, choices)
            raise RunError(f"{group}={value} is not one of the choices.{advice} Choices: {', '.join(choices)}.")


def run_key(argument: str, keys: list[str]) -> str:
    """Returns " Try run=PATH." where an argument is a path alone and the command has a key for a run, else ""."""
    is_path = "/" in argument.partition("=")[0] or Path(argument).exists()
    return f" Try run={argument}." if "run" in keys and is_path else ""


def nearest_key(name: str, keys: list[str]) -> str:
    """Returns " Did you mean KEY?" for a name that TRL has, or the closest key at any depth; "" where none is close."""
    from experiments.keys import leaves
    from experiments.running.fields import trainer_fields

    nested = {leaf: key for leaf, key in leaves().items() if key.partition(".")[0] in keys}
    options = {option: f"trainer.{option}" for option in trainer_fields()} if "trainer" in keys else {}
    known = options | nested | {key: key for key in keys}
    ours = TRL_NAMES.get(name)
    if ours is not None and ours.partition(".")[0] in keys:
        return f" Did you mean {ours}?"
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {known[close[0]]}?" if close else ""


def near_miss(value: str, choices) -> str:
    """Returns " Did you mean X?" for the closest choice, "" where none is close."""
    close = difflib.get_close_matches(str(value), list(choices), n=1)
    return f" Did you mean {close[0]}?" if close else ""
