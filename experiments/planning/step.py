"""What the memory of one process depends on, from which memory_parts.py and memory.py count its bytes."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.planning.architectures import Architecture

SAMPLES_HERE = ("hf", "hf_bfloat16")  # `rollouts_by` that is transformers' generate


@dataclass(frozen=True)
class Step:
    """What the memory of one process depends on.

    Args:
        reference: whether a second copy of the policy is held, from which the KL term is measured.
        lora_rank: of LoRA on `lora_targets` (None: all linear modules); None where all parameters are trained.
        dtype: of the forward: float32 or bfloat16. Trained weights are float32 beneath it.
        parallel: ddp, fsdp2 or zero3, over `processes`.
        rollouts: of this process in a step; forward: of them in one forward.
        prompt, response: widths of the padded batch, in tokens.
        checkpointing: gradient checkpointing, of whole layers.
        sync_each_forward: whether fsdp2 reduces gradients after every forward of a step (`sync_each_batch` of
            accelerate); by default only after the last, and keeps them whole until then.
        sampler: hf, hf_bfloat16, vllm (in this process) or vllm_server (on other GPUs); rows: generated at a time by
            the first two.
        tensor_parallel, memory_share, sleep: of vllm; memory_share is of `card`, the bytes of a GPU.
        on_gpu: False for the formulas of a CPU, against which peaks are measured.
    """

    architecture: Architecture
    dtype: str
    rollouts: int
    forward: int
    prompt: int
    response: int
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] | None = None
    parallel: str = "ddp"
    processes: int = 1
    checkpointing: bool = True
    sync_each_forward: bool = False
    sampler: str = "hf"
    rows: int | None = None
    tensor_parallel: int = 1
    memory_share: float = 0.3
    sleep: bool = True
    card: float = 80e9
    on_gpu: bool = True
    reference: bool = False

    @property
    def accumulates(self) -> bool:
        """Whether a step has several forwards, so that gradients exist before the last."""
        return self.rollouts > self.forward

    @property
    def trained(self) -> int:
        """Returns the number of trained parameters."""
        if self.lora_rank is None:
            return self.architecture.parameters
        return self.architecture.lora_parameters(self.lora_rank, self.lora_targets)

    @property
    def frozen(self) -> int:
        return 0 if self.lora_rank is None else self.architecture.parameters

    @property
    def share(self) -> float:
        """Returns the share of weights, gradients and optimizer that this process holds: 1 under ddp."""
        return 1.0 if self.parallel == "ddp" else 1.0 / self.processes

    @property
    def generates(self) -> bool:
        """Returns whether transformers' generate samples, by the policy or by a bfloat16 copy of it."""
        return self.sampler in SAMPLES_HERE

    @property
    def number(self) -> int:
        """Returns bytes of a number that the forward computes."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def precision(self) -> str:
        """Returns the key of KEPT_BY_LAYER in experiments/planning/memory_parts.py."""
        if self.lora_rank is not None:
            return f"lora {self.dtype}"
        return "mixed" if self.dtype == "bfloat16" and self.parallel == "ddp" else self.dtype

    @property
    def residual(self) -> int:
        """Returns bytes of a number of the residual stream, which has the dtype of the embedding: float32 if mixed."""
        return 4 if self.precision == "mixed" else self.number

    @property
    def width(self) -> int:
        return self.prompt + self.response
