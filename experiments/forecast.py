"""Forecasts which baseline has the least gradient noise on a model and a task, without a backward pass.

python experiments/forecast.py                                                    # the tiny policy on arithmetic
python experiments/forecast.py model=hub model.name=OWNER/NAME task=gsm8k prompts=32 rollouts=32
python experiments/forecast.py run=runs/arithmetic-tiny/otb-n4-seed0              # rollouts that a run has kept
Each prompt's rollouts are saved at once: the same command resumes after a kill, and later only prints. docs/forecast.md
has the formula, what it was compared with, and where not to trust it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments import checks
from experiments.checks.choices import check_keys_of_choice
from experiments.checks.files import check_files, check_training_rows
from experiments.checks.values import check_numbers, whole_number
from experiments.measuring.asked import asked_estimators, check_checkpoint, measurement_folder, shipped_estimators
from experiments.running.build import build, opened
from experiments.running.command_line import CONF, exit_codes, refusals, run_hydra
from otb.baselines import needs_of, reads_probabilities_alone
from otb.errors import RunError
from otb.sandbox import Sandbox
from otb.tasks import Task

MEASUREMENT = ("task", "model", "checkpoint", "temperature", "seed")  # keys that rollouts depend on
OF_A_FORECAST = ("run", "steps", "estimators", "group_sizes", "partitions", "prompts_per_step", "seed", "runs_dir")
NUMBERS = {
    "prompts": whole_number(3),
    "rollouts": whole_number(2),
    **dict.fromkeys(("partitions", "prompts_per_step"), whole_number(1)),
    "seed": whole_number(0),
}
REFERENCE = "rloo"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="forecast")
def main(cfg: DictConfig) -> None:
    hydra_cfg = HydraConfig.get()
    with refusals():
        check_numbers(cfg, NUMBERS)
        estimators = checked_estimators(cfg)
        if cfg.run is not None:
            typed = [override.lstrip("+").split("=")[0] for override in hydra_cfg.overrides.task]
            path, steps = check_reading(cfg, typed)
            from experiments.measuring.forecasting import forecast_of_run  # takes seconds: torch, pandas

            return forecast_of_run(cfg, estimators, path, steps)
        task, sandbox = check_sampling(cfg)
        folder = measurement_folder(cfg, task, hydra_cfg.runtime.choices, "forecast", MEASUREMENT)
        sample_and_forecast(cfg, estimators, task, sandbox, folder)


def sample_and_forecast(cfg: DictConfig, estimators: dict, task: Task, sandbox: Sandbox | None, folder: Path) -> None:
    """Samples what is missing in `folder`, and prints the forecast. Raises RunError."""
    from experiments.measuring import forecasting  # takes seconds: torch, pandas

    if forecasting.missing(cfg, folder):
        check_files(cfg, task, {})
        folder.mkdir(parents=True, exist_ok=True)
        from experiments.measuring.forecast_rollouts import sample  # transformers, trl
        from experiments.running.run_lock import RunLock

        with RunLock(folder), opened(sandbox):
            sample(cfg, task, sandbox, folder)
    forecasting.forecast_of_folder(cfg, estimators, folder)


def checked_estimators(cfg: DictConfig) -> dict:
    """Returns name -> baseline of rloo and the estimators that are asked for.

    Raises RunError for one that reads more than rewards, lengths and score norms.
    """
    shipped = {name: build_baseline(name) for name in shipped_estimators()}
    known = [name for name, baseline in shipped.items() if reads_probabilities_alone(baseline)]
    asked = asked_estimators(cfg, known)
    for name in asked:
        if name not in known:
            more = sorted(needs_of(shipped[name]) - {"score_norms"}) or ["earlier steps"]
            raise RunError(
                f"estimators: {name} reads {' and '.join(more)}, and a forecast knows rewards, lengths and score norms "
                f"alone. Known: {known}. python experiments/variance.py measures all of them on a small model."
            )
    return {name: shipped[name] for name in dict.fromkeys([REFERENCE, *asked])}


def build_baseline(name: str):
    """Returns the baseline of conf/baseline/NAME.yaml."""
    return build(OmegaConf.create({"baseline": OmegaConf.load(CONF / "baseline" / f"{name}.yaml")}), "baseline")


def check_sizes(cfg: DictConfig, limit: int | None) -> None:
    """Raises RunError for group sizes that are not whole numbers from 2 to `limit`."""
    sizes = OmegaConf.to_container(cfg)["group_sizes"]
    most = "" if limit is None else f" to rollouts = {limit}"
    fits = isinstance(sizes, list) and all(type(n) is int and 2 <= n <= (limit or n) for n in sizes)
    if not fits or not sizes:
        raise RunError(
            f"group_sizes={sizes} must be whole numbers from 2{most}, because rloo compares rollouts. Try "
            f"group_sizes=[{min(4, limit or 4)}]."
        )


def check_sampling(cfg: DictConfig) -> tuple[Task, Sandbox | None]:
    """Returns the task and the sandbox of a task with tools. Raises RunError for what cannot be sampled."""
    check_sizes(cfg, cfg.rollouts)
    if cfg.steps is not None:
        raise RunError(f"steps={cfg.steps} chooses among the kept steps of a run. Add run=RUN, or leave it out.")
    if cfg.rollouts_by.name != "hf":
        raise RunError(
            f"rollouts_by={cfg.rollouts_by.name}: this command scores what transformers' generate samples; another "
            "sampler has other numerics, for which only a run corrects. Use rollouts_by=hf, or sample with a run "
            "(experiments/run.py log_energy=true rollouts.every=1) and read it: run=RUN."
        )
    check_keys_of_choice(cfg, "rollouts_by")
    check_numbers(cfg, {"rollouts_by.rows": whole_number(1, "null", "null for all of a prompt")})
    check_checkpoint(cfg)
    task, sandbox = checks.check_policy_and_task(cfg)
    check_training_rows(task)
    return task, sandbox


def check_reading(cfg: DictConfig, typed: list[str]) -> tuple[Path, list[int] | None]:
    """Returns the path and the steps whose rollouts are read. Raises RunError for keys that would be ignored."""
    check_sizes(cfg, None)
    for key in typed:
        if key.split(".")[0] not in OF_A_FORECAST:
            raise RunError(f"{key} would be ignored: run={cfg.run} reads rollouts that exist. Leave it out, or run=.")
    path = Path(str(cfg.run)).expanduser()
    if not path.exists():
        raise RunError(f"run={cfg.run} does not exist. Give a run directory, or a parquet file with rollouts.")
    steps = OmegaConf.to_container(cfg)["steps"]
    steps = [steps] if type(steps) is int else steps
    if steps is not None and not (steps and all(type(step) is int for step in steps)):
        raise RunError(f"steps={cfg.steps} must be a list of kept steps, or null for all. Try steps=[20].")
    return path, steps


def command_line(arguments: list[str]) -> None:
    """Runs `python experiments/forecast.py ARGUMENTS`; the process ends with an exit code of otb/errors.py."""
    with exit_codes(after_stop="continues with the missing prompts"):
        run_hydra(main, __file__, arguments, "forecast")


if __name__ == "__main__":
    command_line(sys.argv[1:])
