"""Evaluates policies: avg@k, pass@k and maj@k of a model, or of all checkpoints of a run, on one or more tasks.

python experiments/evaluate.py model=qwen2.5-7b 'tasks=[aime24,aime25,amc23,math500]' rollouts_by=vllm
python experiments/evaluate.py run=runs/arithmetic-tiny/otb-n4-seed0
python experiments/evaluate.py run=RUN watch=true gpus=8
Every sample is saved as soon as it is drawn: the same command resumes after a kill, and a larger k only adds samples.
docs/evaluate.md defines the measures and lists what samples depend on.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # vLLM reads it when it is imported

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.evaluation.command import check_files, plan
from experiments.running.build import opened
from experiments.running.command_line import CONF, ending_at_once, exit_codes, refusals, run_hydra
from experiments.running.processes import start_processes, starts_processes


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="evaluate")
def main(cfg: DictConfig) -> None:
    # Unresolved, because `task.path=data/${task.name}` refers to keys of this project, not of Hydra.
    overrides = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    with refusals():
        processes = cfg.gpus if starts_processes(cfg) else int(os.environ.get("WORLD_SIZE", 1))
        wanted = plan(cfg, overrides, HydraConfig.get().runtime.choices["task"], processes)
        samples = cfg.watch or wanted.pending()
        if samples:
            check_files(wanted)
        start_processes(cfg, __file__, sys.argv[1:])
        if samples:
            with opened(wanted.sandbox):
                from experiments.evaluation.evaluator import evaluate  # takes seconds: torch, transformers, trl

                evaluate(wanted)
        if int(os.environ.get("RANK", 0)) == 0:
            from experiments.evaluation.accuracy_table import report

            wanted.release()
            report(wanted)
        if "WORLD_SIZE" in os.environ and "torch" in sys.modules:
            from experiments.running.train import wait_for_all_processes

            wait_for_all_processes()  # if one ended earlier, it could end the first before its report


def command_line(arguments: list[str]) -> None:
    """Runs `python experiments/evaluate.py ARGUMENTS`; the process ends with an exit code of otb/errors.py."""
    with ending_at_once(), exit_codes(after_stop="continues with the missing samples"):
        run_hydra(main, __file__, arguments, "evaluate")


if __name__ == "__main__":
    command_line(sys.argv[1:])
