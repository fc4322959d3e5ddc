"""What the sandbox's tests share: whether they can run here, short limits, and what a sandbox left behind."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from otb.sandbox import Limits

LIMITS = Limits(wall_seconds=1.0, cpu_seconds=1.0, memory_bytes=320 << 20)
REPOSITORY = Path(__file__).parents[2]

# In CI a missing bubblewrap is a failure, never a skip.
needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None and "CI" not in os.environ, reason="bubblewrap is not installed"
)

# Reads a program a line (JSON), answers with its status and output.
DRIVER = """
import json, os, sys
from otb.sandbox import Limits
from otb.sandbox.bubblewrap import Bubblewrap
with Bubblewrap(Limits(**json.loads(sys.argv[1])), workers=2) as sandbox:
    print(json.dumps(os.getuid()), flush=True)
    for line in sys.stdin:
        result = sandbox.run(json.loads(line))
        print(json.dumps([result.status, result.stdout]), flush=True)
"""


def descendants(pid: int) -> list[int]:
    """The live processes below this one."""
    found = [pid]
    for parent in found:
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
            found += [int(c) for t in tasks for c in Path(f"/proc/{parent}/task/{t}/children").read_text().split()]
        except OSError:
            continue
    return found[1:]


def open_descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


class OrdinaryUser:
    """A sandbox that an ordinary user opened; root starts it. The Python is shown to that user in a mount namespace."""

    UID = 4321

    def __init__(self, limits: dict):
        libraries = sysconfig.get_path("purelib")
        sources = {"python": sys.base_prefix, "repository": REPOSITORY, "packages": libraries}
        mounts = "mount --make-rprivate / && mount -t tmpfs none /mnt"
        for name, source in sources.items():
            mounts += f" && mkdir /mnt/{name} && mount --bind {source} /mnt/{name}"
        uid = f"setpriv --reuid {self.UID} --regid {self.UID} --clear-groups"
        python = f"/mnt/python/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
        environment = {
            "PYTHONPATH": "/mnt/repository:/mnt/packages",
            "LD_LIBRARY_PATH": "/mnt/python/lib",
            "PATH": os.environ["PATH"],
        }
        words = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            f'{mounts} && cd /mnt && exec {uid} {python} -B -c "$0" "$1"',
            DRIVER,
        ]
        self.process = subprocess.Popen(
            [*words, json.dumps(limits)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.uid = self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        assert line, "the ordinary user's sandbox did not start"
        return json.loads(line)

    def run(self, program: str) -> tuple[str, str]:
        self.process.stdin.write(json.dumps(program) + "\n")
        self.process.stdin.flush()
        return tuple(self._answer())

    def close(self):
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()
