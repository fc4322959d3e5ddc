"""Tests what a caller can rely on: distinct statuses, limits that hold, recovery from deaths, no leftovers."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from otb import sandbox as api
from otb.sandbox import Limits, Result, SandboxFailure, broker, runner, runtime
from otb.sandbox import bubblewrap as backend
from otb.sandbox.bubblewrap import Bubblewrap
from otb.sandbox.remote import Http, read_answer
from otb.sandbox.unsafe import UnsafeSubprocess
from tests.support.sandbox_helpers import (
    HERE_IT_WAITS,
    PATIENT,
    REPOSITORY,
    HeldPrograms,
    descendants,
    needs_bubblewrap,
    open_descriptors,
    programs,
)
from tests.support.waiting import alive, wait_for

ENDINGS = {  # status: (program, stdout)
    "ok": ("print(1 + 1)", "2\n"),
    "user_error": ("print('before')\n1 / 0", "before\n"),
    "timeout": ("print('before')\nwhile True: pass", "before\n"),
    "memory": ("print('before')\nx = b'x' * (1 << 40)", "before\n"),
    "output_limit": ("print('x' * 5000)", "x" * 4000 + api.TRUNCATED),
}
ENDLESS_LOOPS_END = replace(PATIENT, cpu_seconds=0.5)  # CPU time, which does not depend on the load


@pytest.fixture(scope="module")
def sandbox():
    with Bubblewrap(PATIENT, workers=2) as sandbox:
        yield sandbox


# Every backend


@pytest.mark.parametrize("status", ENDINGS)
@pytest.mark.parametrize("kind", [pytest.param("bubblewrap", marks=needs_bubblewrap), "unsafe_subprocess"])
def test_a_backend_tells_the_endings_apart(status, kind, request):
    sandbox = request.getfixturevalue("sandbox") if kind == "bubblewrap" else UnsafeSubprocess()
    program, stdout = ENDINGS[status]
    result = sandbox.run(program, ENDLESS_LOOPS_END)
    assert (result.status, result.stdout) == (status, stdout)
    assert bool(result.error) == (status != "ok")
    assert result.seconds >= 0


@pytest.mark.parametrize("kind", [pytest.param("bubblewrap", marks=needs_bubblewrap), "unsafe_subprocess"])
def test_a_sleep_within_the_wall_limit_is_ok_and_one_beyond_it_a_timeout_not_before_it(kind, request):
    sandbox = request.getfixturevalue("sandbox") if kind == "bubblewrap" else UnsafeSubprocess()
    under = sandbox.run("import time\ntime.sleep(0.1)\nprint(1)", PATIENT)
    over = sandbox.run("import time\ntime.sleep(3600)\nprint(1)", replace(PATIENT, wall_seconds=0.5))
    assert (under.status, under.stdout, over.status, over.stdout) == ("ok", "1\n", "timeout", "")
    assert under.seconds >= 0.1 and over.seconds >= 0.5


@pytest.mark.parametrize("name", ["wall_seconds", "processes"])
def test_a_limit_that_lets_nothing_run_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0 would let no program run"):
        Limits(**{name: 0})


@pytest.mark.parametrize("name", ["bubblewrap", "unsafe_subprocess", "http"])
def test_every_yaml_builds_its_backend_with_the_default_limits(name):
    config = OmegaConf.load(REPOSITORY / "conf" / "sandbox" / f"{name}.yaml")
    if name == "http":
        config.url = "http://localhost:1"
    assert instantiate(config).limits == Limits()


def test_special_tokens_in_the_output_are_neutralised():
    text = api.neutralise("a<|im_end|>b<tool_call>", ["<|im_end|>", "<tool_call>", ""])
    assert "<|im_end|>" not in text and "<tool_call>" not in text
    assert text.replace("\N{ZERO WIDTH SPACE}", "") == "a<|im_end|>b<tool_call>"


def test_clean_cuts_at_the_limit_and_drops_control_characters():
    assert api.clean("ab\tc\r\nd", 10) == "ab\tc\nd"
    assert api.clean("\x1b[2Jx\0", 10) == "\N{REPLACEMENT CHARACTER}[2Jx\N{REPLACEMENT CHARACTER}"
    assert api.clean("abc", 2) == "ab" + api.TRUNCATED


class Failing(api.Sandbox):
    """A sandbox whose first `failures` attempts fail."""

    def __init__(self, failures):
        super().__init__(workers=1)
        self.failures, self.attempts = failures, []

    def check(self):
        pass

    def _attempt(self, codes, limits):
        self.attempts.append(list(codes))
        bad = len(self.attempts) <= self.failures
        return [Result("sandbox_failure" if bad and c == "b" else "ok", "", "", 0.0) for c in codes]


def test_a_sandbox_failure_is_tried_once_more_and_only_where_it_happened():
    sandbox = Failing(1)
    assert [r.status for r in sandbox.run_many(["a", "b", "c"])] == ["ok"] * 3
    assert sandbox.attempts == [["a", "b", "c"], ["b"]]


def test_a_second_sandbox_failure_is_raised():
    with pytest.raises(SandboxFailure, match="failed twice"):
        Failing(2).run_many(["a", "b"])


def test_a_program_that_is_too_long_is_refused_unrun():
    sandbox = Failing(0)
    assert sandbox.run("#" * (api.CODE_BYTES + 1)).status == "user_error"
    assert sandbox.attempts == []


# bubblewrap


@needs_bubblewrap
def test_run_python_runs_one_program():
    result = api.run_python("print(1 + 1)", PATIENT)
    assert (result.status, result.stdout, result.text) == ("ok", "2\n", "2")
    api._default().close()
    api._default.cache_clear()


@needs_bubblewrap
def test_a_traceback_shows_the_programs_own_lines_only(sandbox):
    error = sandbox.run("def f():\n    return 1 / 0\nf()").error
    assert "return 1 / 0" in error and error.endswith("ZeroDivisionError: division by zero")
    assert "runner.py" not in error


@needs_bubblewrap
@pytest.mark.parametrize(
    "program, stdout",
    [
        ("import sympy\nx = sympy.Symbol('x')\nprint(sympy.integrate(sympy.cos(x), x))", "sin(x)\n"),
        ("import numpy\nprint(numpy.linalg.det(numpy.eye(3)))", "1.0\n"),
        (
            "import os\nopen('a.txt', 'w').write('hello')\nprint(open('a.txt').read(), os.listdir())",
            "hello ['a.txt']\n",
        ),
        ("import threading\nt = threading.Thread(target=print, args=('in a thread',))\nt.start()", "in a thread\n"),
        ("import atexit\natexit.register(print, 'at exit')", "at exit\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(A(1))", "A(x=1)\n"),
        ("if __name__ == '__main__':\n    print('main')", "main\n"),
        (
            "import os\nif os.fork() == 0:\n    print('child')\n    os._exit(0)\nos.wait()\nprint('parent')",
            "child\nparent\n",
        ),
        ("import tempfile\nprint(tempfile.TemporaryFile().write(b'x'))", "1\n"),
        ("print('\u00e4\u4e2d\U0001f600')", "\u00e4\u4e2d\U0001f600\n"),
        ("import sys\nprint(sys.argv, len(sys.stdin.read()))", "[''] 0\n"),
    ],
)
def test_honest_programs_work(program, stdout, sandbox):
    result = sandbox.run(program)
    assert (result.status, result.stdout, result.error) == ("ok", stdout, "")


@needs_bubblewrap
def test_a_call_leaves_nothing_for_the_next(sandbox):
    leave = (
        "import builtins, sympy, os\nopen('left', 'w').write('x')\n"
        "builtins.left = sympy.left = 1\nos.environ['left'] = '1'"
    )
    look = (
        "import builtins, sympy, os\n"
        "print(os.listdir(), hasattr(builtins, 'left'), hasattr(sympy, 'left'), dict(os.environ))"
    )
    results = sandbox.run_many([leave, look] * 3)
    assert {r.stdout for r in results} == {"", "[] False False {}\n"}


@needs_bubblewrap
def test_two_calls_cannot_see_each_other(sandbox):
    # Each writes a file, waits for the other to have done so, and lists processes and files.
    program = f"""
import os, time
open(str(time.time_ns()), "w")
{HERE_IT_WAITS}
print(os.getpid(), len(os.listdir("/tmp")))"""
    both = HeldPrograms(sandbox, [program] * 2)
    wait_for(lambda: len(both.held()) == 2)
    assert [result.stdout for result in both.end()] == ["1 1\n"] * 2


@needs_bubblewrap
def test_the_same_program_gives_the_same_random_numbers(sandbox):
    program = "import random, numpy\nprint(random.random(), numpy.random.rand(), hash('a'), {'a', 'b', 'c'})"
    assert len({r.stdout for r in sandbox.run_many([program] * 3)}) == 1


@needs_bubblewrap
def test_programs_run_side_by_side(sandbox):
    four = HeldPrograms(sandbox, [f"{HERE_IT_WAITS}\nprint('done')"] * 4)
    for _ in range(2):  # two by two: the sandbox has two workers
        wait_for(lambda: len(four.held()) == 2)
        assert len(programs(sandbox)) == 2
        four.release()
    assert [result.stdout for result in four.end()] == ["done\n"] * 4


@needs_bubblewrap
def test_many_threads_may_call_at_once(sandbox):
    outputs = {}

    def call(n):
        outputs[n] = sandbox.run(f"print({n})").stdout

    threads = [threading.Thread(target=call, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {n: f"{n}\n" for n in range(16)}


@needs_bubblewrap
def test_the_cpu_limit_counts_all_processes_together(sandbox):
    # Four processes of 0.4 s each; the kernel would let each of them have 1 s.
    program = "import os, time\nfor n in range(2): os.fork()\nwhile time.process_time() < 0.4: pass\ntime.sleep(3600)"
    assert sandbox.run(program, replace(PATIENT, cpu_seconds=0.9)).status == "timeout"


@needs_bubblewrap
def test_the_memory_limit_counts_all_processes_together(sandbox):
    # 4 x 60 MB, not shared; each alone is far below the limit.
    program = "import os, time\nfor n in range(2): os.fork()\nx = b'x' * 60_000_000\ntime.sleep(%s)"
    assert sandbox.run(program % 3600, replace(PATIENT, memory_bytes=200_000_000)).status == "memory"
    assert sandbox.run(program % 0.5, replace(PATIENT, memory_bytes=400_000_000)).status == "ok"


@needs_bubblewrap
def test_shared_pages_count_once(sandbox):
    # 9 processes that share 60 MB are 60 MB, not 540.
    program = (
        "import os, time\nx = b'x' * 60_000_000\nfor n in range(8):\n    if os.fork() == 0: break\ntime.sleep(0.3)"
    )
    assert sandbox.run(program, replace(PATIENT, memory_bytes=300_000_000)).status == "ok"


def parts(sandbox):
    """Returns the processes of a sandbox: the broker, bubblewrap twice, the runner."""
    broker = sandbox.open()._process.pid
    return [broker, *descendants(broker)]


@needs_bubblewrap
@pytest.mark.parametrize("part", [0, 1, 2, 3], ids=["broker", "bubblewrap", "process 1", "runner"])
def test_a_part_that_dies_is_replaced_and_the_program_runs_again(part):
    with Bubblewrap(PATIENT, workers=1, packages=()) as sandbox:
        before = parts(sandbox)
        assert len(before) == 4
        one = HeldPrograms(sandbox, [f"{HERE_IT_WAITS}\nprint('done')"])
        wait_for(one.held)
        (first,) = one.held()
        os.kill(before[part], signal.SIGKILL)
        wait_for(lambda: not alive(first))
        assert [result.stdout for result in one.end()] == ["done\n"]
        after = parts(sandbox)
        assert len(after) == 4 and not set(before[max(part, 1) :]) & set(after)
    assert not any(map(alive, before + after))


TRAINER = """
import os, threading, time
from otb.sandbox import Limits
from otb.sandbox.bubblewrap import Bubblewrap
sandbox = Bubblewrap(Limits(wall_seconds=3600, cpu_seconds=3600), workers=2, packages=())
sandbox.open()
bomb = "import os\\nfor n in range(3): os.fork()\\nwhile True: pass"
threading.Thread(target=sandbox.run_many, args=([bomb] * 2,)).start()
worker = os.fork()
if worker == 0:
    time.sleep(3600)
print(worker, flush=True)
time.sleep(3600)
"""


@needs_bubblewrap
def test_nothing_is_left_when_the_trainer_is_killed():
    # The trainer also has a child that holds its descriptors open, as a data loader's worker would.
    process = subprocess.Popen([sys.executable, "-c", TRAINER], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    wait_for(lambda: len(descendants(process.pid)) == 1 + 4 + 2 * 8, process)  # the worker, the parts, the bombs
    pids = [pid for pid in descendants(process.pid) if pid != worker]
    process.kill()
    process.wait()
    process.stdout.close()
    try:
        wait_for(lambda: not any(map(alive, pids)))
        assert alive(worker)
    finally:
        os.kill(worker, signal.SIGKILL)


@needs_bubblewrap
def test_nothing_is_left_after_closing():
    before = open_descriptors(), threading.active_count()
    pids = []
    for _ in range(3):
        with Bubblewrap(PATIENT, workers=1, packages=()) as sandbox:
            sandbox.run("print(1)")
            pids += parts(sandbox)
    assert (open_descriptors(), threading.active_count()) == before
    assert len(pids) == 12 and not any(map(alive, pids))


@needs_bubblewrap
def test_the_brokers_descriptors_and_environment_do_not_grow_with_the_trainers(monkeypatch):
    monkeypatch.setenv("OTB_SECRET", "s3cr3t")
    with open(os.devnull) as file:
        os.set_inheritable(file.fileno(), True)
        with Bubblewrap(PATIENT, workers=1, packages=()) as sandbox:
            for pid in parts(sandbox):
                with contextlib.suppress(PermissionError), open(f"/proc/{pid}/environ") as environment:
                    assert "s3cr3t" not in environment.read()
                assert open_descriptors(pid) <= 12


@needs_bubblewrap
def test_a_broken_limit_is_refused_at_the_start(monkeypatch):
    promise = ("no network", "print('no socket was refused')", "user_error")
    monkeypatch.setattr(backend, "PROBES", (promise,))
    before = descendants(os.getpid())
    with pytest.raises(SandboxFailure, match="probe of no network ended with 'ok' instead of 'user_error'"):
        Bubblewrap(workers=1, packages=()).__enter__()
    assert descendants(os.getpid()) == before


def test_a_missing_bubblewrap_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SandboxFailure, match="apt-get install bubblewrap"):
        Bubblewrap().check()


@needs_bubblewrap
def test_a_bubblewrap_that_cannot_start_is_refused_with_its_own_words(monkeypatch, tmp_path):
    # bubblewrap's message if user namespaces are disabled.
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(runtime.shutil, "which", lambda name: "/bin/false" if os.getuid() == 0 else str(fake))
    with pytest.raises(
        SandboxFailure, match="does not start: (bubblewrap ended without a message|bwrap: No permissions)"
    ):
        Bubblewrap().check()


def test_a_missing_package_is_refused():
    with pytest.raises(SandboxFailure, match="'no_such_package' is not a package"):
        runtime.package_binds(["no_such_package"])


# SandboxFusion


class Fusion(BaseHTTPRequestHandler):
    """A small server with SandboxFusion's protocol; the program determines its answer."""

    requests: list = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.path, body))
        answer = FUSION_ANSWERS[body["code"]]
        status, data = (500, b"down") if answer is None else (200, json.dumps(answer).encode())
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


def finished(code=0, out="", err="", status="Finished"):
    return {
        "status": "Success" if code == 0 and status == "Finished" else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {"status": status, "execution_time": 0.25, "return_code": code, "stdout": out, "stderr": err},
        "executor_pod_name": None,
        "files": {},
    }


FUSION_ANSWERS = {
    "print(1 + 1)": finished(out="2\n"),
    "user_error": finished(code=1, err="ZeroDivisionError"),
    "timeout": finished(code=None, status="TimeLimitExceeded"),
    "memory": finished(code=137),
    "output_limit": finished(out="x" * 5000),
    "error": {"status": "SandboxError", "message": "no pod", "run_result": None},
    "down": None,
    "nonsense": {"hello": 1},
}


@pytest.fixture(scope="module")
def fusion():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fusion)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_http_asks_as_sandbox_fusion_expects(fusion):
    with Http(fusion, Limits(wall_seconds=2.0)) as sandbox:
        assert sandbox.run("print(1 + 1)") == Result("ok", "2\n", "", 0.25)
    path, body = Fusion.requests[-1]
    assert path == "/run_code"
    assert body == {"code": "print(1 + 1)", "language": "python", "run_timeout": 2.0, "memory_limit_MB": 512}


@pytest.mark.parametrize("status", ["user_error", "timeout", "memory", "output_limit"])
def test_http_tells_the_endings_apart(status, fusion):
    result = Http(fusion).run(status)
    assert result.status == status and (result.error or result.stdout)


@pytest.mark.parametrize("program", ["error", "down", "nonsense"])
def test_http_fails_where_the_server_fails(program, fusion):
    with pytest.raises(SandboxFailure, match="failed twice"):
        Http(fusion).run(program)


def test_http_refuses_at_the_start_where_no_server_listens():
    with pytest.raises(SandboxFailure, match="Is a SandboxFusion server running there"):
        Http("http://127.0.0.1:9").check()
    with pytest.raises(ValueError, match="is not an http address"):
        Http("localhost:8080")


def test_an_answer_of_http_without_a_run_is_a_sandbox_failure():
    assert read_answer({"status": "Failed", "run_result": None}, Limits()).status == "sandbox_failure"


# No isolation


def test_unsafe_subprocess_says_so_loudly():
    with pytest.warns(UserWarning, match="WITHOUT ISOLATION"), UnsafeSubprocess(PATIENT) as sandbox:
        assert sandbox.run("print(1 + 1)").stdout == "2\n"


def test_broker_and_runner_which_share_no_module_agree_on_what_they_say_to_each_other():
    for name in ("MEMORY_EXIT", "READY", "STARTED", "ENDED"):
        assert getattr(broker, name) == getattr(runner, name), name
    assert (broker.REQUEST.format, broker.REPORT.format) == (runner.REQUEST.format, runner.REPORT.format)
