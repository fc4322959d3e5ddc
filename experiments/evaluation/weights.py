"""Loads the weights of successive policies into one model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig
from peft import PeftModel

from experiments.running.policy import base_and_adapter, source_of
from otb.policies.models import load_model
from otb.tasks import Task


class Policies:
    """Loads policies of one architecture into `model`; each replaces the previous one.

    warm_start: called with step, steps and loss if the tiny policy must be trained first.
    """

    def __init__(self, warm_start: Callable[[int, int, float], None]):
        self.model = None
        self.source: str | None = None  # folder or hub id of the weights in the model; for an adapter, its folder
        self.base: str | None = None  # folder or hub id of the adapter's base; None without an adapter
        self._warm_start = warm_start

    def load(self, cfg: DictConfig, task: Task, checkpoint: Path | None) -> bool:
        """Loads a checkpoint, or the model of `cfg` itself if None; returns whether the weights have changed.

        task: the task on which the tiny policy is warm-started. Raises RunError if the weights cannot be loaded.
        """
        base, adapter = base_and_adapter(cfg, task, checkpoint, self._warm_start)
        if (source := adapter or base) == self.source:
            return False
        attention = cfg.model.get("attn_implementation")
        model = load_model(source_of(cfg, base), cfg.model.revision, cfg.model.dtype, attention)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter)
        if self.model is None:
            self.model = model.eval()
        else:
            self.model.load_state_dict(model.state_dict())
        self.source, self.base = source, None if adapter is None else base
        return True
