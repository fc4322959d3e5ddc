"""Composes recipes of conf/experiment and other configurations as Hydra does for a run."""

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from experiments.running.build import Run, build
from hydra_plugins.otb_launchers import Sweeper
from otb.training.options import batches
from tests.support.commands import ROOT

RECIPES = {path.stem: path for path in sorted((ROOT / "conf" / "experiment").glob("*.yaml"))}


def composed(*overrides: str, command: str | None = "config"):
    """Returns a command's configuration; command=None composes only groups, chosen as `+task=NAME`."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(command, overrides=list(overrides), return_hydra_config=command == "config")


def runs_of(cfg) -> list[list[str]]:
    """Returns the overrides of every run that `-m experiment=RECIPE` starts."""
    params = OmegaConf.to_container(cfg.hydra.sweeper.params)
    overrides = OverridesParser.create().parse_overrides([f"{key}={values}" for key, values in params.items()])
    (batch,) = Sweeper.split_arguments(overrides, None)
    return batch


def run_of(cfg: DictConfig, processes: int = 1) -> Run:
    """Returns the run of a configuration without checks: packages and GPUs that it needs may be missing here."""
    step = batches(cfg.prompts_per_step, cfg.group_size, processes, cfg.model.rollouts_per_forward)
    return Run(cfg, build(cfg, "task"), None, {}, build(cfg, "baseline"), {}, processes, step)
