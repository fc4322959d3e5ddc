"""What a run or a sweep would need, before anything is started: tokens, memory per GPU, GPU-hours, disk.

python experiments/plan.py experiment=paper_tool_use hydra/launcher=slurm_8gpu card=h100-80gb
python experiments/plan.py model=qwen3-8b-base task=dapo_math group_size=4,16 response_share=0.3
It takes the keys of experiments/run.py, composes the same configuration, and takes beside them those of conf/plan.yaml,
what it assumes. docs/plan.md has the formulas, and how far they are from measured peaks. Imports no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.planning.estimate_table import print_plan
from experiments.planning.settings import plan
from experiments.running.command_line import refusals


def command_line(arguments: list[str]) -> None:
    """Runs `python experiments/plan.py ARGUMENTS`. Exits with 2 for what is refused; "does not fit" is an answer."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return
    with refusals():
        print_plan(*plan(arguments))


if __name__ == "__main__":
    sys.argv[0] = str(Path(__file__))
    command_line(sys.argv[1:])
