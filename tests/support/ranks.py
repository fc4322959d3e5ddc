"""Starts the two processes of a sharded run: forked from a server that has imported torch, or by torchrun."""

import os
import subprocess
from pathlib import Path

import psutil

from tests.support import commands
from tests.support.sharding import CPU_SECONDS, KILLED_AFTER, SHARDED
from tests.support.waiting import PATIENCE_SECONDS, ended_with, wait_for


class Ranks:
    """Represents a running sharded run. kind: "fsdp2" or "zero3"; the arguments `given` contain its parallel=.

    python: the interpreter of another environment, in which torchrun runs `module`; None forks the processes.
    killed_after: a rank, and the CPU seconds after which it is killed.
    """

    def __init__(
        self,
        kind: str,
        given: list[str],
        log: Path,
        python: str | None = None,
        killed_after: tuple[int, float] | None = None,
        module: str = "sharded_run",
        **environment: str,
    ):
        self.log = log
        variables = {SHARDED: kind, CPU_SECONDS: f"{log}.cpu_seconds"} | environment
        if killed_after is not None:
            variables[KILLED_AFTER] = "{} {}".format(*killed_after)
        if python is None:
            self.processes = commands.start_two(given, log, **variables)
        else:
            self.processes = [started(python, module, given, log, variables)]

    def join(self) -> bool:
        """Waits for the end; if one process fails, ends the rest, as torchrun does. Returns whether all succeeded."""
        wait_for(self._over, every=0.02)
        well = all(ended_with(process) == 0 for process in self.processes)
        self.kill()
        return well

    def _over(self) -> bool:
        codes = [ended_with(process) for process in self.processes]
        return None not in codes or any(codes)

    def kill(self) -> None:
        """Sends SIGKILL to all processes at once."""
        for process in self.processes:
            if ended_with(process) is None:
                for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                    one.kill()
        for process in self.processes:
            process.join() if hasattr(process, "join") else process.wait(PATIENCE_SECONDS)

    def printed(self) -> str:
        """Returns the output of all processes so far."""
        return "".join(file.read_text() for file in sorted(self.log.parent.glob(f"{self.log.name}*")))


def started(python, module, given, log, variables) -> subprocess.Popen:
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", f"tests.support.{module}", *given]
    variables = os.environ | {"PYTHONPATH": str(commands.ROOT)} | variables
    with open(log, "ab") as output:
        return subprocess.Popen(command, cwd=commands.ROOT, env=variables, stdout=output, stderr=output)
