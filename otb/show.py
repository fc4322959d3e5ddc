"""Forwards `python -m otb.show` to analysis/runs/show.py, where run directories are read."""

import runpy

if __name__ == "__main__":
    runpy.run_module("analysis.runs.show", run_name="__main__")
