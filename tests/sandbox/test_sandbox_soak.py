"""Tests that a long random mix of good and hostile programs leaves no process, file, descriptor or memory behind.

The suite runs 500 calls; OTB_SOAK_CALLS=5000 python -m pytest tests/sandbox/test_sandbox_soak.py runs for minutes.
"""

import os
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from otb.sandbox.bubblewrap import Bubblewrap
from tests.support.sandbox_helpers import PATIENT, SHORT, descendants, needs_bubblewrap, open_descriptors
from tests.support.waiting import wait_for

CALLS = int(os.environ.get("OTB_SOAK_CALLS", 500))
SHORTER = replace(SHORT, wall_seconds=0.4, cpu_seconds=0.4)

# (weight, program, how it may end)
PROGRAMS = [
    (20, "print(1 + 1)", "ok"),
    (10, "import sympy\nprint(sympy.factorint(5040))", "ok"),
    (5, "import numpy\nprint(numpy.arange(9).sum())", "ok"),
    (5, "open('a', 'wb').write(b'x' * (1 << 22))", "ok"),
    (5, "1 / 0", "user_error"),
    (3, "raise SystemExit(3)", "user_error"),
    (3, "import ctypes\nctypes.string_at(0)", "user_error"),
    (3, "while True: print('x' * 100)", "output_limit"),
    (3, "x = b'x' * (1 << 40)", "memory"),
    (2, "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)", "ok"),
    (2, "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
    (2, "import os\nfor n in range(2): os.fork()\nx = b'x' * (100 << 20)\nwhile True: pass", "memory timeout"),
    (2, "while True: pass", "timeout"),
    (2, "import threading, time\nfor n in range(9): threading.Thread(target=time.sleep, args=(9,)).start()", "timeout"),
    (2, "import os\nfor n in range(40): os.dup(0)\nos.kill(-1, 9)\nos._exit(9)", "user_error"),
    (2, "n = 0\nwhile True:\n    open(str(n), 'w').write('x' * 4096)\n    n += 1", "user_error timeout"),
    (2, "\0", "user_error"),
]


def proportional_bytes(pids):
    rollups = (Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() for pid in pids)
    return sum(int(line.split()[1]) << 10 for lines in rollups for line in lines if line.startswith("Pss:"))


def run_mixed(sandbox, chosen):
    """Runs programs that end and programs that exceed the time limit, each kind with its own limits, in parallel."""
    endless = [(program, statuses) for _, program, statuses in chosen if "timeout" in statuses]
    ending = [(program, statuses) for _, program, statuses in chosen if "timeout" not in statuses]
    with ThreadPoolExecutor(2) as threads:
        answers = threads.map(
            lambda some, limits: sandbox.run_many([program for program, _ in some], limits),
            (endless, ending),
            (SHORTER, PATIENT),
        )
        return list(zip(endless + ending, [result for results in answers for result in results], strict=True))


@needs_bubblewrap
def test_a_mix_of_good_and_hostile_programs_leaves_nothing_behind():
    draw = random.Random(0)
    weights = [weight for weight, _, _ in PROGRAMS]
    files = {*os.listdir(tempfile.gettempdir()), *os.listdir()}
    memory = []
    with Bubblewrap(workers=2) as sandbox:
        parts = [sandbox.open()._process.pid, *descendants(sandbox.open()._process.pid)]

        def descriptors():
            return [open_descriptors(), *map(open_descriptors, parts)]

        before = descriptors()
        for done in range(0, CALLS, 50):
            for (program, statuses), result in run_mixed(sandbox, draw.choices(PROGRAMS, weights, k=50)):
                assert result.status in statuses.split(), (program, result)
            assert [parts[0], *descendants(parts[0])] == parts
            # <= because garbage collection may close more. The broker answers before it closes the call's descriptors.
            wait_for(lambda: all(now <= then for now, then in zip(descriptors(), before, strict=True)))
            if done >= 100:  # the first calls fill caches
                memory.append(proportional_bytes(parts))
    assert len(parts) == 4 and not set(parts) & set(descendants(os.getpid()))
    assert max(memory[-3:]) < memory[0] + (8 << 20)
    left = {*os.listdir(tempfile.gettempdir()), *os.listdir()} - files
    assert not {name for name in left if "otb" in name or "sandbox" in name or "bwrap" in name}
