"""Sharded training on processes of a CPU: FSDP2 over gloo, which accelerate switches on for GPUs only.

Without this, a run with `fsdp` on CPU processes trains as plain DDP, and a test of it has tested nothing.
"""

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def let_fsdp_run_on_cpus() -> None:
    """Makes accelerate take `fsdp` at its word on gloo processes. Call it before a trainer's arguments are made."""
    accelerates_own = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        accelerates_own(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is None or self.distributed_type != DistributedType.MULTI_CPU:
            return
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)

    AcceleratorState.__init__ = init
