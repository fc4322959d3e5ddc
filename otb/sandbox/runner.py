"""The process inside bubblewrap: it imports the allowed packages once, forks a child per call, and runs no model code.

bubblewrap starts this file. The broker sends one message a call over the socket whose number is the first argument: the
limits, and descriptors for the code, stdout, stderr and "go". Each child is process 1 of a PID namespace. It takes
fresh mount, network, IPC, UTS, cgroup and user namespaces, gives up every capability, loads the system call filter,
writes "go" and only then reads the code.

It imports only the standard library, because nothing else is visible. Constants that it shares with broker.py are
written in both files.
"""

import _signal  # the C halves: signal and socket would add 11 ms to the 9 ms that Python takes to start
import _socket
import atexit
import builtins
import ctypes
import gc
import os
import resource
import select
import struct
import sys
import time

# The same as in broker.py; tests/sandbox/test_sandbox.py compares them.
MEMORY_EXIT = 86  # an uncaught MemoryError
REQUEST = struct.Struct("=QdQQQ")  # call, then the limits that a child sets itself: cpu, memory, processes, files
REPORT = struct.Struct("=BQid")  # what, call, exit status (negative = signal), CPU seconds
READY, STARTED, ENDED = range(3)

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 4, 24, 38, 22
SECCOMP_MODE_FILTER = 2
LINUX_CAPABILITY_VERSION_3 = 0x20080522

# Packages load a lot at first use (30 of the 35 ms of a first sympy.solve); loading it here saves every child the time.
WARM_UP = {
    "numpy": "import numpy.random",
    "sympy": """
from sympy import *
from sympy.core.cache import clear_cache
x, y = symbols("x y")
solve(x**2 - 5*x + 6, x), solve([x + y - 2, x - y], [x, y]), nsolve(x**2 - 2, x, 1)
simplify(sin(x)**2 + cos(x)**2), expand((x + 1)**2), factor(x**2 - 1), factorint(5040)
diff(x * exp(x), x), integrate(sin(x)**2, x), limit(sin(x) / x, x, 0), summation(x, (x, 1, 10))
N(pi, 20), Matrix([[1, 2], [3, 4]]).inv(), latex(x / 2), str(Rational(1, 3))
clear_cache()
""",
}

libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]


def must(name, *arguments):
    """Calls a function of the C library, and raises OSError if it fails."""
    if getattr(libc, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}{arguments}: {os.strerror(error)}")


class SockFprog(ctypes.Structure):
    """The system call filter in the kernel's format, struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def confine(limits, program):
    """Takes fresh namespaces and a private /tmp, gives up capabilities, sets resource limits, loads the filter.

    No other order works: each step needs a right that a later step gives up.
    """
    cpu_seconds, memory_bytes, processes, file_bytes = limits
    must("unshare", CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)
    options = f"size={file_bytes},nr_inodes=1024,mode=0700".encode()
    must("mount", b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
    os.chdir("/tmp")
    # Without a uid map the uid is unmapped, so no further user namespace can be made and only processes of this
    # namespace are counted. The namespaces above belong to the outer one, where the child now has no rights.
    must("unshare", CLONE_NEWUSER)
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, None, 0, 0) != 0:
            break  # the kernel has no further capability
    must("capset", (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())
    for kind, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, int(cpu_seconds) + 1),  # whole seconds, per process; the broker polls the sum
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_STACK, 8 << 20),
        (resource.RLIMIT_SIGPENDING, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))
    must("prctl", PR_SET_DUMPABLE, 0, None, 0, 0)  # a crash must not feed a core dump handler on the host
    must("prctl", PR_SET_NO_NEW_PRIVS, 1, None, 0, 0)
    must("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program), 0, 0)


def report(error, source):
    """Writes a traceback of bounded length, with the program's lines and without this file's frames."""
    import linecache
    import traceback

    linecache.cache["<python>"] = (len(source), None, source.splitlines(True), "<python>")
    frames = error.__traceback__.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames, limit=-8))
    sys.stderr.write(text if len(text) <= 2000 else f"{text[:1000]}\n...\n{text[-1000:]}")


def run(source):
    """Runs the program as __main__, like the interpreter, and returns its exit code."""
    main = type(sys)("__main__")
    vars(main)["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    try:
        exec(compile(source, "<python>", "exec", dont_inherit=True), main.__dict__)
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):
            return (ending.code or 0) & 0xFF
        sys.stderr.write(f"{ending.code}\n")
        return 1
    except MemoryError:
        return MEMORY_EXIT
    except BaseException as error:
        report(error, source)
        return 1
    return 0


def child(limits, program, code, out, err, go):
    """Runs one program as process 1 of its namespaces, and never returns."""
    exit_code = 1
    try:
        try:
            os.setsid()
            for warning in (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2):
                _signal.signal(warning, _signal.SIG_DFL)  # ignored signals are inherited from the broker
            confine(limits, program)
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)  # flags on a shared stdin would outlive the call
            os.dup2(out, 1)
            os.dup2(err, 2)
            keep = [2, *sorted((code, go)), 1 << 16]
            for low, high in zip(keep, keep[1:], strict=False):
                os.closerange(low + 1, high)
            os.write(go, b"+" + struct.pack("=d", time.monotonic()))
        except BaseException as error:
            os.write(go, b"-" + repr(error).encode())
            os._exit(1)
        os.close(go)
        for name in {"random", "numpy.random"} & sys.modules.keys():
            sys.modules[name].seed(0)  # the same program always prints the same
        with open(code, "rb") as file:
            source = file.read().decode("utf-8", "surrogatepass")
        exit_code = run(source)
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # waits for all but daemon threads
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except MemoryError:
        exit_code = MEMORY_EXIT
    except BaseException:
        exit_code = exit_code or 1
    finally:
        os._exit(exit_code)


def start(limits, descriptors, program, me):
    """Forks the child of one call as process 1 of a new PID namespace. Returns its pid."""
    must("unshare", CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        child(limits, program, *descriptors)
    must("setns", me, CLONE_NEWPID)
    return pid


def main():
    """Imports the packages, sends READY, then starts a child per request and reports its end.

    Arguments: the number of the socket to the broker, sys.path, the packages to import.
    """
    broker = _socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = sys.argv[2].split(":")
    for package in sys.argv[3].split(","):
        if package:
            __import__(package)
            exec(WARM_UP.get(package, ""), {})
    instructions = broker.recv(1 << 16)
    program = SockFprog(len(instructions) // 8, instructions)
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # the site module, which adds them, is not loaded
    os.environ.clear()
    sys.argv[:] = [""]
    atexit._clear()
    me = os.pidfd_open(os.getpid())
    gc.collect()
    gc.freeze()  # otherwise the collector would touch, and so copy, every page that children share
    broker.send(REPORT.pack(READY, 0, 0, 0.0))

    children = {}  # pidfd -> (call, pid)
    poll = select.poll()
    poll.register(broker, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == broker.fileno():
                data, attached, _, _ = broker.recvmsg(REQUEST.size, _socket.CMSG_LEN(16))
                if not data:
                    return
                descriptors = struct.unpack("=4i", attached[0][2])
                call, *limits = REQUEST.unpack(data)
                pid = start(limits, descriptors, program, me)
                pidfd = os.pidfd_open(pid)
                rights = _socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("=i", pidfd)
                broker.sendmsg([REPORT.pack(STARTED, call, 0, 0.0)], [rights])
                children[pidfd] = call, pid
                poll.register(pidfd, select.POLLIN)
                for used in descriptors:
                    os.close(used)
            else:
                poll.unregister(descriptor)
                call, pid = children.pop(descriptor)
                _, status, usage = os.wait4(pid, 0)
                os.close(descriptor)
                cpu = usage.ru_utime + usage.ru_stime
                broker.send(REPORT.pack(ENDED, call, os.waitstatus_to_exitcode(status), cpu))


if __name__ == "__main__":
    main()
