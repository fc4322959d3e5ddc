"""`experiments/run.py` whose FSDP2 or ZeRO-3 shards over CPU processes, as over GPUs: started by torchrun in tests."""

import sys

from experiments import hardware
from tests.support import holds
from tests.support.sharding import let_sharding_run_on_cpus

if __name__ == "__main__":
    let_sharding_run_on_cpus(deepspeed="parallel=zero3" in sys.argv)
    hardware.visible_gpus = lambda: ["0", "1"]  # two, as far as the checks are concerned
    holds.install()
    from experiments.run import command_line

    command_line(sys.argv[1:])
