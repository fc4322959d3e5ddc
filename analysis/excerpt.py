"""Forwards `python -m analysis.excerpt` to analysis/runs/excerpt.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("analysis.runs.excerpt", run_name="__main__")
