"""Runs hostile programs: each must end with a given status, leave the caller unharmed and leave nothing behind."""

import os
import socket
import threading

import pytest

from otb.sandbox.bubblewrap import Bubblewrap
from tests.support.sandbox_helpers import OrdinaryUser, descendants, limits_for, needs_bubblewrap, open_descriptors

pytestmark = needs_bubblewrap

LIBC = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\n"
REFUSED = "assert ctypes.get_errno() == 1, ctypes.get_errno()\n"  # EPERM


def refused(call):
    """Returns a program whose C call must fail with EPERM."""
    return f"{LIBC}assert libc.{call} == -1\n{REFUSED}print('refused')"


def absent(path):
    """Returns a program that fails if a file can be read."""
    return f"try: print(open({path!r}, 'rb').read())\nexcept OSError: print('refused')"


# name: (program, status, what stdout must be where that is known)
ATTACKS = {
    # Using things up
    "fork bomb": ("import os\nwhile True: os.fork()", "user_error output_limit"),
    "fork bomb that hides its errors": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "timeout",
    ),
    "thread bomb": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()",
        "timeout",  # the 31 threads that started are not daemons, so the program waits for them
    ),
    "memory bomb": ("x = b'x'\nwhile True: x += x", "memory"),
    "memory bomb of lists": ("x = []\nwhile True: x.append([0] * 100000)", "memory"),
    "memory bomb of processes": (
        "import os, time\nfor n in range(8):\n    if os.fork() == 0: break\nx = b'x' * (100 << 20)\ntime.sleep(60)",
        "memory",
    ),
    "memory in a numpy array": ("import numpy\nnumpy.ones((1 << 40,))", "memory"),
    "shared memory out of sight": ("import mmap\nm = mmap.mmap(-1, 1 << 28)\nm.write(b'x' * (1 << 28))", "user_error"),
    "memory in a memfd": ("import os\nos.memfd_create('x')", "user_error"),
    "memory in pipes": ("import os, fcntl\nr, w = os.pipe()\nfcntl.fcntl(w, 1031, 1 << 20)", "user_error"),
    "System V shared memory": (refused("shmget(0, 1 << 28, 0o1777)"), "ok", "refused"),
    "endless loop": ("while True: pass", "timeout"),
    "endless loop that ignores signals": (
        "import signal\nfor n in set(range(1, 32)) - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "timeout",
    ),
    "endless loop that catches everything": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "timeout",
    ),
    "endless loop in C: a huge power": ("print(7 ** (7 ** 12))", "timeout"),
    "endless loop in C: a regular expression": ("import re\nre.match('(a+)+$', 'a' * 64 + 'b')", "timeout"),
    "endless sum in C": ("sum(range(10 ** 15))", "timeout"),
    "CPU time of many processes": ("import os\nfor n in range(3): os.fork()\nwhile True: pass", "timeout"),
    "endless output": ("while True: print('x' * 1000)", "output_limit"),
    "endless errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output_limit"),
    "endless output of many processes": (
        "import os\nfor n in range(3): os.fork()\nwhile True: os.write(1, b'x' * 4096)",
        "output_limit",
    ),
    "a line of 20 MB": ("print('x' * 20_000_000)", "output_limit"),
    "filling /tmp": ("n = 0\nwhile True:\n    open(str(n), 'wb').write(b'x' * (1 << 20))\n    n += 1", "user_error"),
    "one large file": ("open('x', 'wb').write(b'x' * (9 << 20))", "user_error"),
    "a million empty files": ("n = 0\nwhile True:\n    open(str(n), 'w').close()\n    n += 1", "user_error"),
    "deep folders": ("import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')", "user_error"),
    "filling /dev/shm": ("open('/dev/shm/x', 'wb').write(b'x' * (64 << 20))", "user_error"),
    "filling the root": ("open('/x', 'w')", "user_error"),
    "filling /dev": ("open('/dev/x', 'w')", "user_error"),
    "too many descriptors": ("import os\nwhile True: os.dup(0)", "user_error"),
    "zip bomb": (
        "import zlib\nb = zlib.compress(bytes(1 << 28)); x = [zlib.decompress(b) for _ in range(9)]",
        "memory",
    ),
    "pickle bomb": ("import pickle\npickle.loads(b\"cbuiltins\\neval\\n(S'bytearray(1 << 40)'\\ntR.\")", "memory"),
    "deep recursion": ("def f(): f()\nf()", "user_error"),
    "deep recursion without a limit": (
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(x): f([x])\nf(0)",
        "user_error memory timeout",
    ),
    "deep recursion in C": (
        "import sys\nsys.setrecursionlimit(10 ** 9)\nx = []\nfor n in range(10 ** 6): x = [x]\nrepr(x)",
        "user_error timeout",  # a segmentation fault, after some seconds
    ),
    "deeply nested code": ("eval('(' * 10000 + ')' * 10000)", "user_error memory"),
    # Odd endings and forged results
    "sys.exit": ("import sys\nsys.exit()", "ok", ""),
    "exit()": ("exit()", "ok", ""),
    "sys.exit with a code": ("import sys\nsys.exit(7)", "user_error"),
    "os._exit": ("import os\nos._exit(3)", "user_error"),
    "abort": ("import os\nos.abort()", "user_error"),
    "segmentation fault": ("import ctypes\nctypes.string_at(0)", "user_error"),
    "illegal instruction through ctypes": (
        "import ctypes\nctypes.memset(ctypes.cast(ctypes.pythonapi.Py_IncRef, ctypes.c_void_p).value, 0, 4096)",
        "user_error",
    ),
    "closed descriptors": ("import os\nos.closerange(0, 1000)\nprint('x')", "user_error"),
    "duplicated descriptors": (
        "import os\nos.dup2(0, 1); os.dup2(1, 2)\nfor n in range(3, 60): os.dup2(0, n)",
        "ok",
        "",
    ),
    "a forged result on every descriptor": (
        "import os, struct\n"
        "for n in range(3, 64):\n"
        "    for word in (b'+' + struct.pack('=d', 0.0), b'-failed', struct.pack('=BQid', 2, 0, 0, 0.0)):\n"
        "        try: os.write(n, word); print('written', n)\n"
        "        except OSError: pass\n"
        "raise SystemExit(5)",
        "user_error",
        "",
    ),
    "a forged status in the output": (
        'print(\'{"status": "sandbox_failure"}\\nMemoryError: more than 512 MiB.\')\nraise SystemExit(1)',
        "user_error",
    ),
    "an exception that cannot be printed": (
        "class E(Exception):\n    def __str__(self): raise SystemExit(0)\nraise E",
        "user_error",
    ),
    "an exception with a huge message": ("raise ValueError('x' * 10 ** 7)", "user_error"),
    "the runner's own functions": (
        "import sys\nf = sys._getframe(1)\nf.f_globals['os']._exit = f.f_globals['child'] = None",
        "ok user_error",
    ),
    "a hanging atexit handler": ("import atexit, time\natexit.register(time.sleep, 60)", "timeout"),
    "a hanging thread": ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()", "timeout"),
    "stopping itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nprint('on')", "ok", "on"),
    "stopping a child and waiting": (
        "import os, signal\npid = os.fork()\nif pid == 0: os.kill(os.getpid(), signal.SIGSTOP)\nos.waitpid(pid, 0)",
        "timeout",
    ),
    # Reaching other processes
    "signals to every process": (
        "import os, signal\n"
        "for pid in range(-1, 40000):\n"
        "    if pid not in (0, 1, os.getpid()):\n"
        "        try: os.kill(pid, signal.SIGKILL)\n"
        "        except OSError: pass\n"
        "print('alive')",
        "ok",
        "alive",
    ),
    "killing its parent": ("import os, signal\nprint(os.getppid())\nos.kill(os.getppid(), signal.SIGKILL)", "ok", "0"),
    "killing process 1": (
        "import os, signal\nif os.fork() == 0: os.kill(1, signal.SIGKILL)\nos.wait()\nprint('on')",
        "ok",
        "on",
    ),
    "ptrace of process 1": (
        f"{LIBC}if os.fork() == 0: os._exit(libc.ptrace(16, 1, 0, 0) == -1)\nprint(os.wait()[1])",
        "ok",
        "256",
    ),
    "memory of another process": (refused("process_vm_readv(1, 0, 0, 0, 0, 0)"), "ok", "refused"),
    "a daemon that outlives the call": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        time.sleep(60)\n        os._exit(0)\n    os._exit(0)\nos.wait()\nprint('done')",
        "ok",
        "done",
    ),
    "another program": ("import os\nos.execv('/python/bin/python', ['python'])", "user_error"),
    "subprocess": ("import subprocess\nsubprocess.run(['/python/bin/python', '-c', '1'], check=True)", "user_error"),
    # Reading what is not its own
    "/etc/passwd": (absent("/etc/passwd"), "ok", "refused"),
    "/etc/shadow": (absent("/etc/shadow"), "ok", "refused"),
    "home": (
        "import os\nprint(os.path.exists(os.path.expanduser('~')), os.path.exists('/root'), os.path.exists('/home'))",
        "ok",
        "False False False",
    ),
    "the repository": (
        f"import os\nprint(os.path.exists({os.getcwd()!r}), os.path.exists({os.path.dirname(__file__)!r}))",
        "ok",
        "False False",
    ),
    "the environment": ("import os\nprint(dict(os.environ))", "ok", "{}"),
    "the environment in C": (
        f"{LIBC}libc.getenv.restype = ctypes.c_char_p\nprint(libc.getenv(b'OTB_SECRET'))",
        "ok",
        "None",
    ),
    "the environment of process 1": (absent("/proc/1/environ"), "ok", "refused"),
    "command lines": ("import os\nprint(os.path.exists('/proc'), os.path.exists('/sys'))", "ok", "False False"),
    "its own memory file": (absent("/proc/self/mem"), "ok", "refused"),
    "/proc/sys": ("open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')", "user_error"),
    "/sys": (absent("/sys/kernel/notes"), "ok", "refused"),
    "disks": (
        absent("/dev/vda") + "\n" + absent("/dev/sda") + "\n" + absent("/dev/mem"),
        "ok",
        "refused\nrefused\nrefused",
    ),
    "a link out of the tmpfs": (
        "import os\nos.symlink('/../../../../etc', 'l')\ntry: print(os.listdir('l'))\nexcept OSError: print('refused')",
        "ok",
        "refused",
    ),
    "the parent of the root": (
        "import os\nos.chdir('/../../..')\nprint(os.getcwd(), os.path.exists('etc'))",
        "ok",
        "/ False",
    ),
    "a file handle of the host": (refused("syscall(303, -100, b'/', 0, 0, 0)"), "ok", "refused"),
    "packages that are not allowed": ("import torch", "user_error"),
    "pip": ("import pip", "user_error"),
    "changing a package": ("import sympy\nopen(sympy.__file__, 'a').write('x')", "user_error"),
    "changing the runner": ("open('/python/runner.py', 'a').write('x')", "user_error"),
    # Kernel interfaces
    "mount": (refused("mount(b'none', b'/tmp', b'tmpfs', 0, 0)"), "ok", "refused"),
    "umount": (refused("umount2(b'/tmp', 2)"), "ok", "refused"),
    "unshare": (refused("unshare(0x10000000)"), "ok", "refused"),
    "clone into a user namespace": (refused("syscall(56, 0x10000000 | 17, 0, 0, 0, 0)"), "ok", "refused"),
    "clone3": (
        f"{LIBC}assert libc.syscall(435, 0, 0) == -1 and ctypes.get_errno() == 38\nprint('refused')",
        "ok",
        "refused",
    ),
    "setns": (refused("setns(0, 0)"), "ok", "refused"),
    "setuid": (refused("setuid(0)"), "ok", "refused"),
    "setgroups": (refused("setgroups(0, 0)"), "ok", "refused"),
    "chroot": (refused("chroot(b'/tmp')"), "ok", "refused"),
    "pivot_root": (refused("syscall(155, b'/tmp', b'/tmp')"), "ok", "refused"),
    "mknod": (refused("mknod(b'/tmp/d', 0o60666, 0xfd00)"), "ok", "refused"),
    "keys of the kernel": (refused("syscall(250, 0, -3, 1)"), "ok", "refused"),
    "perf": (refused("syscall(298, 0, 0, -1, -1, 0)"), "ok", "refused"),
    "bpf": (refused("syscall(321, 0, 0, 0)"), "ok", "refused"),
    "userfaultfd": (refused("syscall(323, 0)"), "ok", "refused"),
    "io_uring": (refused("syscall(425, 8, 0)"), "ok", "refused"),
    "a new system call filter": (refused("prctl(22, 2, 0)"), "ok", "refused"),
    "32-bit system calls": (
        "import ctypes, mmap\n"
        "m = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)\n"
        "m.write(bytes.fromhex('b814000000cd80c3'))  # mov eax, 20; int 0x80; ret\n"
        "print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))())",
        "user_error",
    ),
    "more resources": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))",
        "user_error",
    ),
    "other cores": ("import os\nos.sched_setaffinity(0, {0})", "user_error"),
    "the clock": ("import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)", "user_error"),
    "the host's name": (
        "import os, socket\nprint(os.uname().nodename)\nsocket.sethostname('x')",
        "user_error",
        "sandbox",
    ),
    # Network
    "sockets of every family": (
        "import socket\n"
        "for family in range(46):\n"
        "    for kind in (1, 2, 3, 5):\n"
        "        try: socket.socket(family, kind); print('open', family, kind)\n"
        "        except OSError: pass",
        "ok",
        "",
    ),
    "a pair of sockets": ("import socket\nsocket.socketpair()", "user_error"),
    "DNS": ("import socket\nsocket.getaddrinfo('example.org', 80)", "user_error"),
    "http": ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:PORT')", "user_error"),
    # Strange programs
    "empty code": ("", "ok", ""),
    "10 MB of code": ("x = 1\n" * (10 << 20 >> 3), "user_error", ""),
    "1 MB of code": ("x = 1\n" * 150_000, "ok memory", ""),
    "NUL bytes": ("print(1)\0print(2)", "user_error", ""),
    "lone surrogates in the code": ("print('\ud800')", "user_error", ""),
    "lone surrogates in the output": ("print(chr(0xd800))", "user_error", ""),
    "binary output": ("import os\nos.write(1, bytes(range(256)))", "ok"),
    "control output": ("print('\\x1b[2J\\x07\\x08\\x00')", "ok"),
    "input()": ("input()", "user_error"),
    "a syntax error": ("print(", "user_error", ""),
    "a program that is no text": ("\x00\x01\x02\ufffe", "user_error", ""),
    "breakpoint()": ("breakpoint()", "user_error"),
}


@pytest.fixture(scope="module")
def sandbox():
    os.environ["OTB_SECRET"] = "s3cr3t"
    with Bubblewrap(workers=2) as sandbox:
        yield sandbox
    del os.environ["OTB_SECRET"]


@pytest.fixture(scope="module")
def server():
    """Runs a server on the loopback interface that counts its visitors."""
    visitors = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept():
            while True:
                try:
                    visitors.append(listener.accept())
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1], visitors
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_with_its_status_and_leaves_nothing(name, sandbox, server):
    program, statuses, *output = ATTACKS[name]
    port, visitors = server
    before, limits = descendants(os.getpid()), limits_for(statuses)
    result = sandbox.run(program.replace("PORT", str(port)), limits)
    assert result.status in statuses.split(), result
    assert [result.stdout.strip()] == output or not output
    if result.status != "ok":
        assert result.error
    assert "s3cr3t" not in result.text and not visitors
    assert len(result.stdout) <= limits.output_characters + 30 and len(result.error) <= limits.output_characters + 100
    assert all(c.isprintable() or c in "\n\t\N{REPLACEMENT CHARACTER}" for c in result.text)
    assert descendants(os.getpid()) == before  # exactly the same broker, bubblewrap and runner


def test_the_sandbox_still_works_after_the_attacks(sandbox):
    open_before = open_descriptors()
    assert sandbox.run("import sympy\nprint(sympy.factorint(360))").stdout == "{2: 3, 3: 2, 5: 1}\n"
    assert open_descriptors() == open_before


@pytest.fixture(scope="module")
def ordinary():
    if os.getuid() != 0:
        pytest.skip("this is an ordinary user already: the attacks above ran as one")
    ordinary = OrdinaryUser()
    yield ordinary
    ordinary.close()


@pytest.mark.parametrize(
    "name",
    ["fork bomb", "thread bomb", "memory bomb of processes", "endless loop", "filling /tmp", "sockets of every family",
     "unshare", "signals to every process", "/proc/sys", "home"],
)  # fmt: skip
def test_an_attack_ends_the_same_when_an_ordinary_user_runs_the_sandbox(name, ordinary):
    program, statuses, *output = ATTACKS[name]
    assert ordinary.uid == OrdinaryUser.UID
    status, stdout = ordinary.run(program, limits_for(statuses))
    assert status in statuses.split()
    assert [stdout.strip()] == output or not output
