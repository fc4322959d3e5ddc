"""Runs many runs: what a sweep's folder holds, which runs it needs, where each stands. `slurm` builds on it."""
