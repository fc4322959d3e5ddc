"""Finds out what GPUs and processor this machine has, without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # names in CPU_INFO: x86, Intel's matrix units, ARM


def visible_gpus() -> list[str]:
    """Returns the names by which CUDA_VISIBLE_DEVICES chooses each GPU that this process may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    lines = listed.stdout.splitlines() if listed.returncode == 0 else []
    return [str(number) for number, line in enumerate(line for line in lines if line.startswith("GPU "))]


def gpu_memory() -> float | None:
    """Returns the bytes of the smallest GPU that nvidia-smi shows; None where this process uses none."""
    if not visible_gpus() or shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    mebibytes = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return min(map(float, mebibytes)) * 2**20 if mebibytes else None


def emulated_bfloat16(dtype: str, on_cpu: bool) -> str:
    """Returns a line for who computes in bfloat16 on a processor that has no instructions for it; else "".

    dtype: `model.dtype`. It stays what it is: the precision of a run must not depend on the machine that it lands on.
    """
    if dtype != "bfloat16" or not on_cpu or not CPU_INFO.exists():
        return ""
    words = set(CPU_INFO.read_text(encoding="utf8", errors="replace").split())
    if words & BFLOAT16_FLAGS:
        return ""
    return "this processor has no bfloat16 and emulates it; model.dtype=float32 is faster here, and another run"
