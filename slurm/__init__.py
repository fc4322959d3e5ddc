"""Sweeps on SLURM: submit.py sends them, job.py brings a run to its end, status.py tells of them. Imports no torch."""
