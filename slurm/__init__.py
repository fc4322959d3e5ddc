"""Sweeps on SLURM: submit.py sends them, job.py runs one run, status.py shows where they stand. Imports no torch."""
