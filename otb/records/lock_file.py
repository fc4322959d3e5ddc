"""Reads the lock file of a run directory: who writes the run, and whether that process still exists.

experiments/running/run_lock.py writes it. Any reader may ask, without torch: the report, SLURM's status, sweeps.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import psutil


def read_lock(file: Path) -> dict:
    """Returns what the lock says about its holder; {} where there is no lock, or a damaged one."""
    try:
        return json.loads(file.read_text(encoding="utf8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def machine() -> str:
    """Names where a process id means one process: this boot of this kernel, this container. Hosts can share a name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def is_here(holder: dict) -> bool:
    """Tells whether a lock's holder runs, or ran, on this machine, so that its process can be looked up."""
    return holder.get("machine") == machine()


def has_process(holder: dict) -> bool:
    """Tells whether the process of a holder on this machine still runs.

    A recycled process id has another start time; a process that ended and that nobody has waited for writes nothing.
    """
    try:
        process = psutil.Process(holder["pid"])
        is_it = abs(process.create_time() - holder["process_started"]) < 1.0
        return is_it and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, KeyError):
        return False
