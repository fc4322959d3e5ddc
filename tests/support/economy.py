"""Saves time in processes of tests without changing their results. Called at the end of all imports."""

import gc
import os
import sys
import types

import yaml

NO_PICTURES = "OTB_TEST_NO_PICTURES"


def economize() -> None:
    """Makes garbage collection and the reading of yaml cheaper, in this process and its forks.

    Every training collects garbage at its end and would visit two million objects of the imported libraries. Frozen
    objects are skipped, and a fork need not copy their pages. PyYAML's C parser gives the same as its Python parser.
    """
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    gc.collect()
    gc.freeze()


def do_not_sync() -> None:
    """Makes fsync do nothing. Written data survives anyway if only the process is killed."""
    os.fsync = lambda descriptor: None


def leave_pictures_out() -> None:
    """Makes a run with NO_PICTURES in its environment skip drawing, which takes as long as six steps with imports."""
    if NO_PICTURES in os.environ:
        module = types.ModuleType("analysis.run_picture")
        module.run_picture = lambda directory: directory.path / "learning_curve.png"
        sys.modules["analysis.run_picture"] = module
