"""Runs Python commands in forks of a process that has imported the libraries and nothing of this project.

A copy of the repository thus runs its own code without importing torch at every command. Each command is one JSON
line on stdin: arguments, folder, environment, and files for the output. Its exit status comes back as a line.
"""

import atexit
import gc
import json
import os
import runpy
import subprocess
import sys
import traceback
import types
from pathlib import Path
from typing import NoReturn

FILE = Path(__file__).resolve()


class LibraryServer:
    """Represents the process to its user: `run` commands one after another, then `close`."""

    def __init__(self, folder: Path):
        """Starts the process. folder: where the commands' output goes."""
        self.folder = folder
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, str(FILE)], env=environment, text=True, **pipes)

    def run(self, arguments: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
        """Runs `python ARGUMENTS` in a folder. -> its exit status and output."""
        files = [self.folder / name for name in ("stdout", "stderr")]
        job = [arguments, str(folder), environment, [str(file) for file in files]]
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        return subprocess.CompletedProcess(arguments, status, *(file.read_text() for file in files))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def serve() -> None:
    """Forks a process per line, which does what `python` does."""
    gc.freeze()  # a collection in a fork would copy the pages of all libraries
    for line in iter(sys.stdin.readline, ""):
        arguments, folder, environment, files = json.loads(line)
        if pid := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            continue
        for descriptor, file in enumerate([os.devnull, *files]):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC), descriptor)
        os.chdir(folder)
        os.environ.update(environment)
        leave(status_of(arguments, folder))


def status_of(arguments: list[str], folder: str) -> int:
    """Runs a command and returns its exit status."""
    try:
        python(arguments, folder)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def leave(status: int) -> NoReturn:
    """Ends this process like a normal exit, but without unloading the libraries, which takes 2 s."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def python(arguments: list[str], folder: str) -> None:
    """Does what `python ARGUMENTS` with PYTHONPATH=FOLDER does, for a file, -m MODULE, or -c TEXT."""
    sys.path[0] = folder
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    import datasets  # noqa: F401
    import hydra  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import pandas  # noqa: F401
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401
    from trl import GRPOTrainer  # noqa: F401

    serve()
    leave(0)
