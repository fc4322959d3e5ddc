"""Every baseline of conf/baseline, built as the command line builds it, so that tests cover a new one unasked."""

from collections.abc import Callable
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import OmegaConf

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "baseline"


def configured_baselines() -> dict[str, Callable]:
    """Returns name -> baseline with the arguments of its yaml; the objects of those that learn are new."""
    return {path.stem: instantiate(OmegaConf.load(path), _convert_="object") for path in sorted(FOLDER.glob("*.yaml"))}
