"""Evaluates policies: avg@k, pass@k and maj@k of models, or of all checkpoints of a run, on one task or several.

python experiments/evaluate.py model=qwen2.5-7b 'tasks=[aime24,aime25,amc23,math500]' trainer.use_vllm=true
python experiments/evaluate.py run=runs/arithmetic-tiny/otb-n4-seed0
torchrun --nproc-per-node 8 experiments/evaluate.py run=RUN watch=true
Every sample is kept as it comes, so that the same command goes on after a kill, and a larger k only adds samples.
docs/evaluate.md says what is measured and what a sample depends on.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments import settings
from experiments.evaluation.command import plan
from experiments.variance import quoted
from otb.errors import REFUSED, STOPPED_FROM_KEYBOARD, RunError


@hydra.main(version_base="1.3", config_path=str(settings.CONF), config_name="evaluate")
def main(cfg: DictConfig) -> None:
    # Unresolved: `task.path=data/${task.name}` refers to the keys of this project, not to Hydra's.
    overrides = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    try:
        wanted = plan(cfg, overrides, HydraConfig.get().runtime.choices["task"])
        if cfg.watch or wanted.pending():
            with settings.opened_sandbox(wanted.with_tools()) as sandbox:
                from experiments.evaluation.evaluator import (
                    evaluate,  # torch, transformers and trl: seconds, so only now
                )

                evaluate(wanted, sandbox)
        if int(os.environ.get("RANK", 0)) == 0:
            from experiments.evaluation.report import report

            wanted.release()
            report(wanted)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(REFUSED)


def command_line(arguments: list[str]) -> None:
    """Runs `python experiments/evaluate.py ARGUMENTS`. Exits with 2 for what is refused, 130 after Ctrl-C."""
    sys.argv = [str(Path(__file__)), *settings.accept_open_keys([quoted(argument) for argument in arguments])]
    try:
        settings.refuse_unknown_choices(sys.argv[1:], "evaluate")
        main()
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the samples that are missing", file=sys.stderr)
        sys.exit(STOPPED_FROM_KEYBOARD)


if __name__ == "__main__":
    command_line(sys.argv[1:])
