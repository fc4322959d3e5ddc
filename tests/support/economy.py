"""What saves processes of tests time, and leaves alone what they compute. Called at the end of all imports."""

import gc
import os
import sys
import types

import yaml

NO_PICTURES = "OTB_TEST_NO_PICTURES"


def economize() -> None:
    """Makes collections of garbage and reading of yaml cheaper, in this process and those forked from it.

    Every training collects garbage at its end, among two million objects of the imported libraries; frozen, they are
    passed over, and a forked process need not copy their pages. PyYAML's C parser gives what its Python one gives.
    """
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    gc.collect()
    gc.freeze()


def do_not_sync() -> None:
    """Makes fsync do nothing: what a process has written outlives it where only the process is killed."""
    os.fsync = lambda descriptor: None


def leave_pictures_out() -> None:
    """Keeps a run with NO_PICTURES in its environment from drawing, which takes as long as six steps with imports."""
    if NO_PICTURES in os.environ:
        module = types.ModuleType("analysis.run_picture")
        module.run_picture = lambda directory: directory.path / "learning_curve.png"
        sys.modules["analysis.run_picture"] = module
