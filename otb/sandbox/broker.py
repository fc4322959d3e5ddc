"""The small process between the trainer and bubblewrap: it starts the sandbox and enforces the limits of every call.

The trainer starts it early, because forking a process of many gigabytes is slow and bubblewrap's die-with-parent
follows the thread that started it. It receives the set-up over a socket, then one request a call. It ends with the
trainer, however the trainer ends, and everything in the sandbox ends with it.

It runs as a script and imports only the standard library. It shares no module with the trainer or with runner.py, so
neither can affect its code. Constants that it shares with runner.py are written in both files.
"""

import contextlib
import ctypes
import enum
import json
import os
import select
import signal
import socket
import stat
import struct
import sys
import time

# The same as in runner.py; tests/sandbox/test_sandbox.py compares them.
MEMORY_EXIT = 86
REQUEST = struct.Struct("=QdQQQ")
REPORT = struct.Struct("=BQid")
READY, STARTED, ENDED = range(3)

START_SECONDS = 60  # from a request to the program's first instruction; long, for a loaded machine
TICK = 0.02  # seconds between two checks of memory and CPU time
PAGE = os.sysconf("SC_PAGE_SIZE")
CLOCK = os.sysconf("SC_CLK_TCK")

libc = ctypes.CDLL(None, use_errno=True)


def drop_root(setup):
    """Binds the runtime to where another uid can read it, in a private mount namespace, and becomes that uid.

    The kernel never enforces RLIMIT_NPROC for the host's uid 0, even under another uid inside, and lets it write to
    /proc/sys. The Python installation is often in a folder that only root may enter.
    """
    ms_bind, ms_rec, ms_private, clone_newns = 4096, 16384, 1 << 18, 0x00020000
    libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
    refusal = "root without the right to mount cannot show the runtime to another uid"
    if libc.unshare(clone_newns) != 0 or libc.mount(b"none", b"/", None, ms_rec | ms_private, None) != 0:
        raise OSError(ctypes.get_errno(), refusal)
    opened = [os.open(source, os.O_PATH) for source, _ in setup["binds"]]  # /tmp, which may hold some, is covered next
    if libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, b"mode=0755") != 0:
        raise OSError(ctypes.get_errno(), refusal)
    for number, (descriptor, bind) in enumerate(zip(opened, setup["binds"], strict=True)):
        target = f"/tmp/{number}"
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):  # the path itself may be in the covered /tmp
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        if libc.mount(f"/proc/self/fd/{descriptor}".encode(), target.encode(), None, ms_bind | ms_rec, None) != 0:
            raise OSError(ctypes.get_errno(), f"bind mount of {bind[0]}")
        os.close(descriptor)
        bind[0] = target
    os.setgroups([])
    os.setresgid(setup["uid"], setup["uid"], setup["uid"])
    os.setresuid(setup["uid"], setup["uid"], setup["uid"])
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: keeps /proc/self our own after the change of uid


def processes(root):
    """Returns the host pids of `root` and of all live processes below it."""
    pids = [root]
    for pid in pids:
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    pids += map(int, file.read().split())
        except OSError:
            continue  # the process has ended
    return pids


def total(pids, name, read):
    """Returns the sum of read(/proc/PID/name) over processes; processes that have ended add nothing."""
    amount = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}") as file:
            amount += read(file)
    return amount


def resident(pids):
    """Returns resident bytes, with shared pages counted once per process: a cheap upper bound of `proportional`."""
    return total(pids, "statm", lambda file: int(file.read().split()[1]) * PAGE)


def proportional(pids):
    """Returns bytes of memory and swap, with shared pages divided among the processes that share them (PSS)."""

    def read(file):
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(("Pss:", "SwapPss:")))

    return total(pids, "smaps_rollup", read)


def cpu_seconds(pids):
    """Returns the CPU seconds of these processes and of children that they have waited for."""
    return total(pids, "stat", lambda file: sum(map(int, file.read().rpartition(")")[2].split()[11:15])) / CLOCK)


class State(enum.Enum):
    """The state of a call. A call passes through them in this order, and skips RUNNING if its program never begins."""

    WAITING = "for a worker"
    STARTING = "sent to the runner; its program has not begun"
    RUNNING = "its program has begun"
    STOPPING = "killed; the verdict is known, but the process may still exist"
    ENDED = "the runner has reported its end"


class Call:
    """One program and its state in the sandbox."""

    def __init__(self, request):
        self.id, self.limits, self.code = request["id"], request["limits"], request["code"]
        self.state = State.WAITING
        self.deadline = None  # from STARTING on: the time at which the state has lasted too long
        self.pidfd = None  # process 1 of the call; the runner sends it while the call is STARTING, or a little later
        self.began = None  # when the program began; None if it never did
        self.verdict = None  # from STOPPING on: the status that the broker decided on
        self.failure = None  # why the program could not begin
        self.text = {}  # descriptor -> bytes received

    def send(self, runner):
        """Sends the program and the write ends of its pipes to the runner."""
        code = os.memfd_create("code")
        with open(os.dup(code), "wb") as file:
            file.write(self.code.encode("utf-8", "surrogatepass"))
            file.seek(0)
        self.code = None
        pipes = [os.pipe() for _ in range(3)]
        self.out, self.err, self.go = (read for read, _ in pipes)
        for read, _ in pipes:
            os.set_blocking(read, False)
            self.text[read] = b""
        theirs = [code, *(write for _, write in pipes)]
        self.state, self.deadline = State.STARTING, time.monotonic() + START_SECONDS
        limits = (self.limits[name] for name in ("cpu_seconds", "memory_bytes", "processes", "file_bytes"))
        with contextlib.suppress(BrokenPipeError):  # the poll will notice the runner's end and finish this call
            socket.send_fds(runner, [REQUEST.pack(self.id, *limits)], theirs)
        for descriptor in theirs:
            os.close(descriptor)

    def read(self, descriptor):
        """Reads the available bytes, up to the limit. Returns False once no more will come."""
        most = 4 * self.limits["output_characters"] + 4  # bytes: UTF-8 has at most 4 a character
        while len(self.text[descriptor]) <= most:
            try:
                data = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.text[descriptor] += data
            if descriptor == self.go:
                self.note_go()
            elif self.too_long(descriptor):
                self.kill("output_limit")
        return False

    def too_long(self, descriptor):
        """Returns whether more characters came in than the output limit allows."""
        text = self.text[descriptor]
        limit = self.limits["output_characters"]
        return len(text) > limit and len(text.decode("utf-8", "replace")) > limit

    def note_go(self):
        """Reads the message that the child sends before its program: it starts now, or the reason why it cannot."""
        word = self.text[self.go]
        if word.startswith(b"+"):
            (self.began,) = struct.unpack("=d", word[1:])
            if self.state is State.STARTING:
                self.state, self.deadline = State.RUNNING, self.began + self.limits["wall_seconds"]
        else:
            self.failure = word[1:].decode()

    def kill(self, verdict):
        """Sets the verdict, unless there is one already, and kills the call as soon as its process is known."""
        self.verdict = self.verdict or verdict
        self.state, self.deadline = State.STOPPING, time.monotonic() + START_SECONDS  # for it to die
        if self.pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)  # process 1: its whole namespace goes with it

    def check_limits(self):
        """Enforces the limits that the kernel cannot enforce for a tree of processes without a cgroup."""
        with open(f"/proc/self/fdinfo/{self.pidfd}") as file:
            pids = processes(int(next(line for line in file if line.startswith("Pid:")).split()[1]))  # -1 = ended
        if resident(pids) > self.limits["memory_bytes"] and proportional(pids) > self.limits["memory_bytes"]:
            self.kill("memory")
        elif cpu_seconds(pids) > self.limits["cpu_seconds"]:
            self.kill("timeout")

    def result(self, code, cpu):
        """Returns the answer to the trainer.

        code: exit status, negative = signal, None = the runner has ended; cpu: CPU seconds of process 1.
        """
        seconds = time.monotonic() - self.began if self.began else 0.0
        for descriptor in (self.go, self.out, self.err):
            self.read(descriptor)  # every writer is dead, so this reads the rest
        status, note = self.verdict, ""
        if not self.began or code is None or status == "sandbox_failure":
            status, note = "sandbox_failure", self.failure or f"the program never started (exit code {code})"
        elif status is None and (self.too_long(self.out) or self.too_long(self.err)):
            status = "output_limit"
        elif status is None and code == -signal.SIGKILL:
            # Nothing inside can kill process 1: either the CPU limit was reached or the machine ran out of memory.
            status = "timeout" if cpu >= self.limits["cpu_seconds"] else "memory"
        elif status is None:
            status = {0: "ok", MEMORY_EXIT: "memory"}.get(code, "user_error")
        if status == "user_error" and not self.text[self.err]:
            note = f"exit code {code}" if code > 0 else f"killed by a signal: {signal.strsignal(-code) or -code}"
        most = self.limits["output_characters"] + 1  # one more shows the trainer that text was cut
        output = {name: self.text[end].decode("utf-8", "replace")[:most] for name, end in self.ends()}
        return {"id": self.id, "status": status, "seconds": seconds, "note": note} | output

    def ends(self):
        return ("out", self.out), ("err", self.err)

    def close(self):
        """Ends the call and closes its descriptors."""
        self.state = State.ENDED
        for descriptor in (*self.text, *([self.pidfd] if self.pidfd is not None else [])):
            os.close(descriptor)


class Broker:
    """Reads requests, runs up to `workers` calls in the sandbox and answers each; restarts the sandbox if it ends."""

    def __init__(self, trainer, parent):
        self.trainer, self.parent = trainer, os.pidfd_open(parent)
        self.inbox = bytearray()
        self.setup: dict = {}  # {} until the trainer has sent it
        self.runner: socket.socket  # the socket to the runner, from start_sandbox on
        self.sandbox: int | None = None  # the pid of bubblewrap
        self.ready = False
        self.waiting = []  # calls that wait for a free worker
        self.running = {}  # id -> call: all calls in the sandbox, in any state from STARTING to STOPPING
        self.owner = {}  # descriptor of a pipe -> call
        self.poll = select.poll()
        for descriptor in (self.trainer.fileno(), self.parent):
            self.poll.register(descriptor, select.POLLIN)

    def start_sandbox(self):
        """Starts bubblewrap and the runner inside, which later sends READY over the socket."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.set_inheritable(True)
        self.errors = os.memfd_create("stderr")
        arguments = [a.replace("@BROKER@", str(theirs.fileno())) for a in self.setup["command"]]
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, self.errors, 2),
        ]
        self.sandbox = os.posix_spawn(arguments[0], arguments, {}, file_actions=actions)
        theirs.close()
        self.runner, self.ready = ours, False
        with contextlib.suppress(BrokenPipeError):  # bubblewrap ended at once: the poll will notice
            self.runner.send(bytes.fromhex(self.setup["filter"]))
        self.poll.register(ours, select.POLLIN)

    def tell(self, message):
        """Sends a message to the trainer."""
        data = json.dumps(message).encode()
        self.trainer.sendall(struct.pack("!I", len(data)) + data)

    def read_trainer(self):
        """Reads the trainer's messages: the set-up, then requests. Raises EOFError if the trainer has ended."""
        data = self.trainer.recv(1 << 20)
        if not data:
            raise EOFError
        self.inbox += data
        while len(self.inbox) >= 4 and len(self.inbox) >= 4 + (size := struct.unpack_from("!I", self.inbox)[0]):
            message = json.loads(self.inbox[4 : 4 + size])
            del self.inbox[: 4 + size]
            if not self.setup:
                self.set_up(message)
            else:
                self.waiting.append(Call(message))

    def set_up(self, setup):
        """Prepares this process as `otb.sandbox.runtime.setup` describes, and starts the sandbox."""
        self.setup = setup
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if memory runs out, the kernel kills the sandbox first, not the trainer
        binds = setup["binds"]
        if os.getuid() == 0:
            drop_root(setup)
        at = setup["command"].index("@BINDS@")
        setup["command"][at : at + 1] = [word for source, target in binds for word in (setup["bind"], source, target)]
        self.start_sandbox()

    def read_runner(self):
        """Reads one report from the runner: it is ready, a call has started, or a call has ended."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.runner, 1 << 16, 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            return self.lost_sandbox()
        what, number, code, cpu = REPORT.unpack(data)
        if what == READY:
            self.ready = True
            self.tell({"ready": True})
        elif what == STARTED:
            call = self.running[number]
            call.pidfd = descriptors[0]
            if call.state is State.STOPPING:  # the verdict came before its process was known
                call.kill(call.verdict)
        else:
            self.finish(self.running[number], code, cpu)

    def lost_sandbox(self):
        """Answers all calls of a sandbox that has ended, and starts another; raises EOFError if it was never ready."""
        self.poll.unregister(self.runner)
        self.runner.close()
        self.end_sandbox()
        errors = os.pread(self.errors, 1 << 16, 0).decode("utf-8", "replace").strip()
        os.close(self.errors)
        for call in list(self.running.values()):
            call.failure = f"the sandbox ended while the program ran: {errors}"
            self.finish(call, None, 0.0)
        if not self.ready:
            self.tell({"broken": errors or "bubblewrap ended without a message"})
            raise EOFError
        self.start_sandbox()

    def finish(self, call, code, cpu):
        """Answers a call that has ended, and removes it."""
        for descriptor in call.text:
            if self.owner.pop(descriptor, None):
                self.poll.unregister(descriptor)
        self.tell(call.result(code, cpu))
        call.close()
        del self.running[call.id]

    def fill(self):
        """Sends waiting calls to the sandbox while workers are free."""
        while self.ready and self.waiting and len(self.running) < self.setup["workers"]:
            call = self.waiting.pop(0)
            self.running[call.id] = call
            call.send(self.runner)
            for descriptor in call.text:
                self.owner[descriptor] = call
                self.poll.register(descriptor, select.POLLIN)

    def watch(self):
        """Enforces deadlines and polled limits. Returns the seconds until the next check, None without calls."""
        now = time.monotonic()
        for call in list(self.running.values()):
            if now < call.deadline:
                if call.state is State.RUNNING and call.pidfd is not None and now - call.began >= TICK:
                    call.check_limits()
            elif call.state is State.STOPPING or call.pidfd is None:  # it neither started nor died in time
                self.kill_sandbox()
            else:
                call.kill("timeout" if call.state is State.RUNNING else "sandbox_failure")
        return min((max(0.001, min(TICK, call.deadline - now)) for call in self.running.values()), default=None)

    def serve(self):
        """Serves requests until the trainer's process has ended."""
        due = None
        looked = 0.0
        while True:
            for descriptor, _ in self.poll.poll(None if due is None else max(1, due * 1000)):
                if descriptor == self.parent:
                    return
                if descriptor == self.trainer.fileno():
                    self.read_trainer()
                elif descriptor in self.owner:
                    if not self.owner[descriptor].read(descriptor):
                        del self.owner[descriptor]
                        self.poll.unregister(descriptor)
                elif descriptor == self.runner.fileno():  # others belonged to a call that has just ended
                    self.read_runner()
            self.fill()
            now = time.monotonic()
            if due is None or now - looked >= due:
                due, looked = self.watch(), now

    def kill_sandbox(self):
        """Kills bubblewrap; the runner and all calls die with it."""
        if self.sandbox is not None:
            os.kill(self.sandbox, signal.SIGKILL)

    def end_sandbox(self):
        """Ends the sandbox and waits for all its processes; its orphans have become our children."""
        self.kill_sandbox()
        self.sandbox = None
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()


def main():
    """Serves the trainer. Arguments: the number of the socket to the trainer, and its pid."""
    trainer, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    trainer.set_inheritable(False)
    pr_set_child_subreaper = 36
    libc.prctl(pr_set_child_subreaper, 1, 0, 0, 0)
    for warning in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(warning, signal.SIG_IGN)  # SLURM's signals are for the trainer; the broker must not end first
    broker = Broker(trainer, parent)
    try:
        broker.serve()
    except (EOFError, ConnectionError):
        pass
    except OSError as error:
        if broker.ready:
            raise
        broker.tell({"broken": str(error)})
    finally:
        broker.end_sandbox()


if __name__ == "__main__":
    main()
