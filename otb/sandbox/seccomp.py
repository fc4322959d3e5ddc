"""The system calls that model-written code may make: an allow list. Everything else fails with EPERM.

The bubblewrap backend builds the filter once per process and sends it to the sandbox as bytes. It deliberately omits
execve, every socket, namespaces, mounts, ids, ptrace, keys, perf, bpf, io_uring, userfaultfd, memfd, System V IPC,
inotify and file locks. Programs need none of them, and only the calls that Python itself uses reach the kernel.
"""

from __future__ import annotations

import functools
import tempfile

READ_WRITE = "read write readv writev pread64 pwrite64 lseek sendfile copy_file_range close close_range dup dup2 dup3"
FILES = (
    "open openat stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 getdents64 getcwd chdir "
    "fchdir rename renameat renameat2 mkdir mkdirat rmdir unlink unlinkat link linkat symlink symlinkat readlink "
    "readlinkat chmod fchmod fchmodat umask utimensat truncate ftruncate fallocate fsync fdatasync pipe pipe2"
)
MEMORY = "munmap mremap mprotect madvise brk"
PROCESSES = (
    "fork vfork exit exit_group wait4 waitid kill tkill tgkill getpid gettid getppid getpgrp getpgid getsid setsid "
    "setpgid getuid geteuid getgid getegid getresuid getresgid getgroups getrlimit setrlimit prlimit64 getrusage "
    "times uname sysinfo sched_yield sched_getaffinity sched_getparam sched_getscheduler getcpu getpriority"
)
THREADS = "futex set_tid_address set_robust_list get_robust_list rseq membarrier restart_syscall arch_prctl"
SIGNALS = (
    "rt_sigaction rt_sigprocmask rt_sigreturn rt_sigtimedwait rt_sigpending rt_sigsuspend sigaltstack pause alarm "
    "getitimer setitimer"
)
WAITING = "select pselect6 poll ppoll nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time getrandom"

CLONE_NEW = 0x7E020000  # every namespace flag of clone
MAP_SHARED = 0x1
# F_DUPFD to F_SETFL and F_DUPFD_CLOEXEC: no locks, no leases, no signals to others, no larger pipes.
FCNTL = (0, 1, 2, 3, 4, 1030)
IOCTL = (0x5401, 0x5421, 0x541B, 0x5450, 0x5451)  # TCGETS (isatty), FIONBIO, FIONREAD, FIONCLEX, FIOCLEX


@functools.cache
def compiled_filter() -> bytes:
    """Builds the filter, an array of struct sock_filter. Raises RuntimeError if libseccomp is missing."""
    import errno

    import pyseccomp as seccomp

    rules = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))
    for name in f"{READ_WRITE} {FILES} {MEMORY} {PROCESSES} {THREADS} {SIGNALS} {WAITING}".split():
        number = seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
        if number >= 0:  # arm64 has no open, fork, ...
            rules.add_rule(seccomp.ALLOW, number)
    for command in FCNTL:
        rules.add_rule(seccomp.ALLOW, "fcntl", seccomp.Arg(1, seccomp.EQ, command))
    for request in IOCTL:
        rules.add_rule(seccomp.ALLOW, "ioctl", seccomp.Arg(1, seccomp.MASKED_EQ, 0xFFFFFFFF, request))
    rules.add_rule(seccomp.ALLOW, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, CLONE_NEW, 0))
    rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")  # a filter cannot read its flags; glibc falls back to clone
    # Shared anonymous memory can exist without being mapped, where the memory limit does not count it.
    rules.add_rule(seccomp.ALLOW, "mmap", seccomp.Arg(3, seccomp.MASKED_EQ, MAP_SHARED, 0))
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
