"""Starts the processes of a run on this machine, and waits for the server that samples for it. Imports no torch."""

from __future__ import annotations

import http.client
import logging
import os
import signal
import sys
import tempfile
import time
import urllib.request

from omegaconf import DictConfig

from experiments.running.command_line import SAID
from experiments.running.warning_signal import passes_on, received, signals_passed_on
from otb.errors import CRASHED, REFUSED, STOPPED_FROM_KEYBOARD, TRY_AGAIN, RunError, first_line

HANDLED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # torchrun's own
LEAVES_SIGNALS = "--signals-to-handle"  # an option of torchrun: the signals that it handles, and no others


def starts_processes(cfg: DictConfig) -> bool:
    """Tells whether `gpus=N` asks for several processes and this one is not yet among them."""
    return type(cfg.gpus) is int and cfg.gpus > 1 and "WORLD_SIZE" not in os.environ


def start_processes(cfg: DictConfig, script: str, arguments: list[str]) -> None:
    """Ends this process as the processes end that `gpus=N` asks for; returns where there is nothing to start.

    script, arguments: the command as Hydra got it. Under SLURM, or under the user's own torchrun, the processes exist
    already.
    """
    if not starts_processes(cfg):
        return
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[SAID] = f"{folder}/said"
        sys.exit(torchrun(["--standalone", "--nproc-per-node", str(cfg.gpus), script, *arguments]))


def torchrun(words: list[str]) -> int:
    """Runs `torchrun WORDS` to its end and returns the exit code: that of the processes where they have said why.

    torchrun itself would end with 1 and a traceback of its own, whatever they end with.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # it tells every end
    if LEAVES_SIGNALS in run.get_args_parser().format_help():  # torch 2.9; else it ends the processes within 30 s
        handled = [name for name in HANDLED if name not in signals_passed_on()]
        words = [LEAVES_SIGNALS, ",".join(handled), *words]
    try:
        run.main(words)
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()} - {-signal.SIGTERM}  # those that it ended
        if passes_on() and received():  # one may not have listened yet, or not have been done when torchrun ended it
            codes = codes - {-signal.SIGUSR2, -signal.SIGKILL} or {TRY_AGAIN}
        if codes and codes <= {REFUSED, TRY_AGAIN, STOPPED_FROM_KEYBOARD}:
            return min(codes)
        print(error, file=sys.stderr)  # which process it was, and the signal that killed it
        return CRASHED
    return 0


def wait_for_server(cfg: DictConfig) -> None:
    """Waits until the vLLM server of `rollouts_by` answers, before anything is loaded.

    Returns at once where no server samples. Raises RunError after `rollouts_by.timeout_s`.
    """
    node = cfg.rollouts_by
    if node.name != "vllm_server":
        return
    ends, told = time.monotonic() + node.timeout_s, False
    while True:
        try:
            with urllib.request.urlopen(f"{node.url.rstrip('/')}/health", timeout=5):
                return
        except (OSError, http.client.HTTPException) as error:
            why = first_line(error)
        if time.monotonic() >= ends:
            raise RunError(
                f"rollouts_by.url={node.url} gave no answer within rollouts_by.timeout_s={node.timeout_s}: {why}. "
                f"Start the server with: trl vllm-serve --model {cfg.model.name}"
            )
        if not told:
            print(f"waiting up to {node.timeout_s} s for the vLLM server at {node.url}", file=sys.stderr, flush=True)
            told = True
        time.sleep(min(1.0, node.timeout_s))


def counted(processes: int) -> str:
    """Returns "1 process" or "8 processes", for a message."""
    return f"{processes} process" + ("" if processes == 1 else "es")
