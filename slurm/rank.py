"""Starts one process of a run inside srun and tells it which of them it is: python -m slurm.rank SCRIPT ARGUMENTS."""

from __future__ import annotations

import os
import sys


def main() -> None:
    if int(os.environ["SLURM_NTASKS"]) > 1:  # by the names that torch.distributed reads; slurm/job.py gave the address
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
