"""Builds every baseline of conf/baseline as the command line does, so tests cover a new baseline automatically."""

from collections.abc import Callable
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import OmegaConf

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "baseline"


def configured_baselines() -> dict[str, Callable]:
    """Returns name -> baseline with the arguments of its yaml. Baselines that learn are new objects."""
    return {path.stem: instantiate(OmegaConf.load(path), _convert_="object") for path in sorted(FOLDER.glob("*.yaml"))}
