"""Checks of the group `auxiliary`. Imports no torch."""

from __future__ import annotations

from types import SimpleNamespace

from omegaconf import DictConfig, OmegaConf

from experiments.running.build import is_off
from otb.errors import RunError
from otb.methods.auxiliary import MultiTokenPrediction, refuse_auxiliary, refuse_both


def check_auxiliary(cfg: DictConfig, head: MultiTokenPrediction) -> None:
    """Raises RunError for a head, built from cfg, that the rest of the configuration has no use for."""
    if cfg.parallel.name != "ddp":
        raise RunError(
            f"parallel={cfg.parallel.name} divides the policy's weights over the processes, and an auxiliary head "
            "reads whole ones. Use parallel=ddp, or auxiliary=none."
        )
    try:
        refuse_both(None if is_off(cfg, "improvement") else cfg.improvement, head)
        options = OmegaConf.to_container(cfg.trainer, resolve=True)
        refuse_auxiliary(SimpleNamespace(**options), head, OmegaConf.to_container(cfg.model).get("lora"))
    except ValueError as error:
        raise RunError(str(error).replace("num_iterations=", "trainer.num_iterations=")) from error
    if head.weights == "shipped" and (cfg.model.name == "tiny" or cfg.model.get("gguf_file")):
        what = "the tiny policy ships no head" if cfg.model.name == "tiny" else "none is read from a GGUF file"
        raise RunError(
            f"auxiliary.weights=shipped: {what}. Use auxiliary.weights=fresh, or a model that has one, such as "
            "model=hub model.name=XiaomiMiMo/MiMo-7B-RL."
        )
    if head.mode != "detach" and cfg.steps <= head.warmup:
        raise RunError(
            f"auxiliary.warmup={head.warmup} is not below steps={cfg.steps}, so that the head would never act. Use a "
            "smaller auxiliary.warmup, or auxiliary.mode=detach."
        )
