"""Runs `experiments/run.py` with FSDP2 or ZeRO-3 over CPU processes as over GPUs; torchrun starts it in tests."""

import sys

from tests.support import sharding

if __name__ == "__main__":
    sharding.install()
    from experiments.run import command_line

    command_line(sys.argv[1:])
