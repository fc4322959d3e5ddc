"""Latency and throughput of the bubblewrap sandbox: `python benchmarks/sandbox.py [workers]`, under a minute.

Prints the bars of the project beside the measured numbers, and the load of the machine: other work on the same cores
makes every number worse. Measured from the caller's side, through the public call.
"""

import os
import statistics
import sys
import time
from pathlib import Path

from otb.sandbox.bubblewrap import Bubblewrap

PRINT = "print(1 + 1)"
SYMPY = "import sympy\nx = sympy.Symbol('x')\nprint(sympy.expand((x + 1) ** 5), sympy.factorint(5040))"
SOLVE = "import sympy\nx = sympy.Symbol('x')\nprint(sympy.solve(x**2 - 5*x + 6, x))"


def seconds(call) -> float:
    started = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - started
    assert result is None or result.status == "ok", result
    return elapsed


def median_ms(call, repeats: int) -> float:
    return 1000 * statistics.median(seconds(call) for _ in range(repeats))


def calls_per_second(sandbox, program: str, calls: int = 200) -> float:
    sandbox.run_many([program] * 10)
    started = time.perf_counter()
    assert {result.status for result in sandbox.run_many([program] * calls)} == {"ok"}
    return calls / (time.perf_counter() - started)


def cold_ms(repeats: int) -> tuple[float, float]:
    """First answers without any package loaded: of a new bubblewrap under a live broker, and of everything new."""
    under_broker, everything = [], []
    for _ in range(repeats):
        with_broker = Bubblewrap(workers=1, packages=())
        everything.append(seconds(lambda sandbox=with_broker: sandbox.run(PRINT)))
        # The broker starts a new bubblewrap when the old one ends; the call below waits for it.
        broker = with_broker.open()
        (bubblewrap,) = Path(f"/proc/{broker._process.pid}/task/{broker._process.pid}/children").read_text().split()
        os.kill(int(bubblewrap), 9)
        under_broker.append(seconds(lambda sandbox=with_broker: sandbox.run(PRINT)))
        with_broker.close()
    return 1000 * statistics.median(under_broker), 1000 * statistics.median(everything)


def main():
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else len(os.sched_getaffinity(0))
    rows = [("cores of this process / programs side by side", f"{len(os.sched_getaffinity(0))} / {workers}", "")]
    rows.append(("load of the machine before, 1 minute", Path("/proc/loadavg").read_text().split()[0], ""))
    with Bubblewrap(workers=workers) as sandbox:
        rows.append(
            ("print(1 + 1), warm, sympy loaded: median ms", f"{median_ms(lambda: sandbox.run(PRINT), 200):.1f}", "<= 7")
        )
        rows.append(("a sympy program, warm: median ms", f"{median_ms(lambda: sandbox.run(SYMPY), 50):.1f}", ""))
        for name, program, bar in (
            ("print(1 + 1)", PRINT, ">= 60"),
            ("sympy: expand, factorint", SYMPY, ">= 40"),
            ("sympy: solve", SOLVE, ""),
        ):
            rows.append((f"{name}: calls per second", f"{calls_per_second(sandbox, program):.0f}", bar))
    under_broker, everything = cold_ms(15)
    rows.append(("print(1 + 1), cold (new bubblewrap, no package): median ms", f"{under_broker:.1f}", "<= 40"))
    rows.append(("the same with a new broker, as the first call of a run", f"{everything:.1f}", ""))
    opened = Bubblewrap(workers=workers)
    rows.append(
        ("open with numpy and sympy, once per run: ms", f"{1000 * seconds(lambda: opened.open() and None):.0f}", "")
    )
    rows.append(("check, once per run: ms", f"{1000 * seconds(opened.check):.0f}", ""))
    opened.close()
    for name, value, bar in rows:
        print(f"{name:62}{value:>10}  {bar}")


if __name__ == "__main__":
    main()
