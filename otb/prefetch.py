"""Forwards `python -m otb.prefetch` to experiments/prefetch.py."""

import runpy

if __name__ == "__main__":
    runpy.run_module("experiments.prefetch", run_name="__main__")
