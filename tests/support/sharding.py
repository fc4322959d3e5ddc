"""Sharded training on processes of a CPU, over gloo: FSDP2 and DeepSpeed ZeRO-3, which accelerate has for GPUs only.

Without this, a run with `fsdp` on CPU processes trains as plain DDP, and a test of it has tested nothing.
"""

import os

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def let_sharding_run_on_cpus(deepspeed: bool) -> None:
    """Makes accelerate take `fsdp` and `deepspeed` at their word on gloo processes, before a trainer's arguments exist.

    deepspeed: join the processes by DeepSpeed, which wants to have made their group itself.
    """
    if deepspeed:
        join_by_deepspeed()
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
    """Makes the process group of a torchrun's processes."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # read at the import; a machine may have a GPU
    import deepspeed

    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
