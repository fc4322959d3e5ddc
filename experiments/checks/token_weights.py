"""Checks of the keys of `token_weights`. Imports no torch."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from experiments.build import build, is_off
from experiments.checks.target import check_target
from otb.errors import RunError
from otb.token_weights import refuse_without_base


def check_token_weights(cfg: DictConfig) -> None:
    """Raises RunError for values that make no sense, and for weights whose base the model does not have."""
    node = cfg.get("token_weights") or {}
    if is_off(cfg, "token_weights"):
        for key in [key for key, value in node.items() if value is not None]:
            raise RunError(f"token_weights.{key}={node[key]} is set without a choice. Add token_weights=arca.")
        return
    check_target("token_weights", node)
    weights = build(cfg, "token_weights")
    if not weights.reads_base:
        return
    try:
        refuse_without_base(weights.signal, OmegaConf.to_container(cfg.model).get("lora"))
    except ValueError as error:
        raise RunError(str(error).replace("lora.bias=", "model.lora.bias=")) from error
