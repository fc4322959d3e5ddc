"""Starts one process of a run inside srun and tells it its rank: python -m slurm.rank SCRIPT ARGUMENTS."""

from __future__ import annotations

import os
import sys


def main() -> None:
    if int(os.environ["SLURM_NTASKS"]) > 1:  # variables of torch.distributed; slurm/job.py has set the address
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
