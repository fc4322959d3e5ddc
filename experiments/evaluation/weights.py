"""The weights of one policy after the other, in one model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig
from peft import PeftModel

from experiments.hardware import source_of
from experiments.train import weights_folder
from otb.errors import RunError
from otb.policies.models import load_model
from otb.tasks import Task


class Policies:
    """Loads policies of one architecture into `model`, each in the place of the one before.

    warm_start: called with step, steps and loss where the tiny policy is trained first.
    """

    def __init__(self, warm_start: Callable[[int, int, float], None]):
        self.model = None
        self.source: str | None = None  # folder or hub id of the weights in the model, of an adapter its own
        self.base: str | None = None  # and of what the adapter is of; None without one
        self._warm_start = warm_start

    def load(self, cfg: DictConfig, task: Task, checkpoint: Path | None) -> bool:
        """Loads a checkpoint, or with None the model of `cfg` itself; returns whether the weights are others now.

        task: the one whose warm start the tiny policy begins from. Raises RunError where the weights cannot be loaded.
        """
        base, adapter = self._place(cfg, task, checkpoint)
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

    def _place(self, cfg: DictConfig, task: Task, checkpoint: Path | None) -> tuple[str, str | None]:
        """Returns folder or hub id of the whole policy, and the folder of the adapter on top of it or None."""
        if checkpoint is None or (checkpoint / "adapter_config.json").exists():
            base = weights_folder(cfg, task, self._warm_start)
            return base, None if checkpoint is None else str(checkpoint)
        if not any(checkpoint.glob("*.safetensors")) and not any(checkpoint.glob("*.bin")):
            raise RunError(
                f"{checkpoint} holds no weights that transformers can load (*.safetensors, *.bin). Give a checkpoint "
                "with the whole policy or an adapter; the parts of a sharded one have to be put together first."
            )
        return str(checkpoint), None
