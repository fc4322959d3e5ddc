"""`experiments/run.py` whose FSDP2 or ZeRO-3 shards over CPU processes, as over GPUs: started by torchrun in tests."""

import sys

from tests.support import sharding

if __name__ == "__main__":
    sharding.install()
    from experiments.run import command_line

    command_line(sys.argv[1:])
