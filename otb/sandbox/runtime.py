"""Finds the Python runtime and the packages that a sandbox shows, and builds bubblewrap's command line.

The bubblewrap backend calls it when it starts its broker.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from otb.sandbox import SandboxFailure

UID = 65534  # nobody: the uid inside, and the broker's uid on the host if the trainer is root
STDLIB = f"/python/{sys.platlibdir}/python{sys.version_info[0]}.{sys.version_info[1]}"  # as the sandbox sees it
LOADERS = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}


def runtime() -> tuple[list[list[str]], list[str], str]:
    """Returns the runtime as [host path, path inside] pairs, package folders to hide in it, the library path inside."""
    stdlib = os.path.realpath(sysconfig.get_path("stdlib"))
    with open("/proc/self/maps") as file:
        libraries = os.path.dirname(os.path.realpath(next(line.split()[-1] for line in file if "/libc.so.6" in line)))
    loader = LOADERS[platform.machine()]
    binds = [
        # type stubs omit the private name; otb/seams.py lists it
        [os.path.realpath(sys._base_executable), "/python/bin/python"],  # type: ignore[attr-defined]
        [os.path.realpath(loader), loader],
        [libraries, libraries],
        [str(Path(__file__).with_name("runner.py")), "/python/runner.py"],
    ]
    if os.path.realpath(sys.base_prefix) == "/usr":
        binds.append([stdlib, STDLIB])
    else:  # conda and pyenv keep Python's shared libraries next to the standard library
        binds.append([os.path.dirname(stdlib), os.path.dirname(STDLIB)])
    hidden = [f"{STDLIB}/{name}" for name in ("site-packages", "dist-packages") if os.path.isdir(f"{stdlib}/{name}")]
    return binds, hidden, f"{os.path.dirname(STDLIB)}:{libraries}"


def package_binds(packages: Sequence[str]) -> list[list[str]]:
    """Returns [host path, path inside] of the packages' folders and of the shared libraries in their wheels."""
    binds = []
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SandboxFailure(
                f"packages={list(packages)}: {package!r} is not a package of this Python; the sandbox can only show "
                f"installed packages. Try `pip install {package}`, or leave it out."
            )
        folder = os.path.realpath(spec.submodule_search_locations[0])
        binds += [
            [path, f"/python/packages/{os.path.basename(path)}"]
            for path in (folder, f"{folder}.libs")
            if os.path.isdir(path)
        ]
    return binds


def command(bwrap: str, hidden: Sequence[str], libraries: str, packages: Sequence[str]) -> list[str]:
    """Returns bubblewrap's command line; the broker later replaces @BINDS@ and @BROKER@ in it."""
    environment = {
        "PYTHONHOME": "/python",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "MALLOC_ARENA_MAX": "1",
        "LD_LIBRARY_PATH": libraries,
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    hide = [["--size", "4096", "--tmpfs", folder, "--remount-ro", folder] for folder in hidden]
    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    namespaces = [f"--unshare-{kind}" for kind in ("user", "pid", "net", "ipc", "uts", "cgroup")]
    path = f"{STDLIB}:{STDLIB}/lib-dynload:/python/packages"
    return [
        *(bwrap, *namespaces, "--die-with-parent", "--new-session", "--hostname", "sandbox"),
        # The runner needs only this capability, in bubblewrap's user namespace, to create namespaces for each call.
        *("--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN", "--uid", str(UID), "--gid", str(UID), "@BINDS@"),
        *(word for words in hide for word in words),
        *(word for device in devices for word in ("--dev-bind", device, device)),
        *("--dir", "/tmp", "--remount-ro", "/", "--chdir", "/", "--clearenv"),
        *(word for name, value in environment.items() for word in ("--setenv", name, value)),
        *("/python/bin/python", "-B", "-s", "-S", "-u", "/python/runner.py", "@BROKER@", path, ",".join(packages)),
    ]


def setup(packages: Sequence[str], workers: int) -> dict:
    """Returns the broker's settings for the sandbox. Raises SandboxFailure, which says what to install or set."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxFailure(
            "bwrap is not on PATH, and model-written code runs only in bubblewrap. Install it (Debian, Ubuntu: "
            "`apt-get install bubblewrap libseccomp2`; Fedora, RHEL: `dnf install bubblewrap libseccomp`), or "
            "try sandbox=http sandbox.url=... for a SandboxFusion server."
        )
    if platform.machine() not in LOADERS:
        raise SandboxFailure(
            f"machine {platform.machine()!r} must be one of {sorted(LOADERS)}. Try sandbox=http sandbox.url=..."
        )
    try:
        from otb.sandbox.seccomp import compiled_filter

        instructions = compiled_filter()
    except (ImportError, RuntimeError) as error:
        raise SandboxFailure(
            f"The system call filter cannot be built ({error}), and the sandbox is not safe without it. Install "
            "libseccomp (`apt-get install libseccomp2`) and `pip install pyseccomp`."
        ) from error
    binds, hidden, libraries = runtime()
    return {
        "command": command(bwrap, hidden, libraries, packages),
        "bind": "--ro-bind",
        "binds": binds + package_binds(packages),
        "uid": UID,
        "workers": workers,
        "filter": instructions.hex(),
    }


def advice() -> str:
    """Returns advice on the usual obstacles that this machine has."""
    hints = []
    for path, wrong, fix in (
        ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ):
        if os.path.exists(path) and Path(path).read_text().strip() == wrong:
            hints.append(f"{path} is {wrong}, but unprivileged user namespaces must be enabled: `{fix}` as root")
    if os.path.exists("/.dockerenv"):
        hints.append("this is a Docker container, and Docker's own filter forbids namespaces")
    if os.getuid() == 0:
        hints.append(
            "this is root, so the code runs as another uid: that uid must be able to read Python's files, and root "
            "must be allowed to mount; or run as an ordinary user"
        )
    hints.append("sandbox=http sandbox.url=... runs the code on a SandboxFusion server instead")
    return "Try: " + "; ".join(hints) + "."
