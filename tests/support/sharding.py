"""Shards training over CPU processes with gloo: FSDP2 and DeepSpeed ZeRO-3, which accelerate supports only on GPUs.

Without it, a run with `fsdp` on CPU processes trains with plain DDP, and a test of it tests nothing.
"""

import os
import signal
import sys
import time
from pathlib import Path

from tests.support import holds

SHARDED = "OTB_TEST_SHARDED"  # in the environment of a run: "fsdp2" or "zero3"
CPU_SECONDS = "OTB_TEST_CPU_SECONDS"  # a file, with the rank at its end, for the time of the processor that it took
KILLED_AFTER = "OTB_TEST_KILLED_AFTER"  # a rank, and the time of the processor after which it ends


def install() -> None:
    """Prepares a process if its environment asks for it. Call it before the run begins."""
    if SHARDED not in os.environ:
        return
    from experiments.running import devices

    let_sharding_run_on_cpus(deepspeed=os.environ[SHARDED] == "zero3")
    devices.visible_gpus = lambda: ["0", "1"]  # two, as far as the checks are concerned
    holds.install()
    if CPU_SECONDS in os.environ:
        note_cpu_seconds(Path(f"{os.environ[CPU_SECONDS]}.{os.environ['RANK']}"))
    rank, _, seconds = os.environ.get(KILLED_AFTER, "").partition(" ")
    if rank == os.environ["RANK"]:
        signal.setitimer(signal.ITIMER_PROF, float(seconds))  # SIGPROF; its default action ends the process


def let_sharding_run_on_cpus(deepspeed: bool) -> None:
    """Makes accelerate obey `fsdp` and `deepspeed` on gloo processes. Call it before a trainer's arguments exist.

    deepspeed: let DeepSpeed create the process group, as it requires.
    """
    if deepspeed:
        sys.modules.setdefault("vllm", None)  # where vLLM does not sample, TRL need not spend seconds on its import
        join_by_deepspeed()
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    accelerates_own = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, deepspeed_plugin=None, **kwargs):
        plain = PartialState._shared_state.get("distributed_type") == DistributedType.MULTI_CPU
        if deepspeed_plugin is not None and plain:
            PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
        accelerates_own(self, *args, fsdp_plugin=fsdp_plugin, deepspeed_plugin=deepspeed_plugin, **kwargs)
        if fsdp_plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)

    AcceleratorState.__init__ = init


def join_by_deepspeed() -> None:
    """Creates the run's process group with DeepSpeed."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # read at the import; a machine may have a GPU
    import deepspeed

    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


def note_cpu_seconds(file: Path) -> None:
    """Makes the run write its CPU time when it is done, because its processes end without Python's shutdown."""
    from experiments.running import train

    wait, before = train.wait_for_all_processes, time.process_time()

    def note_and_wait():
        file.write_text(str(time.process_time() - before))
        wait()

    train.wait_for_all_processes = note_and_wait
