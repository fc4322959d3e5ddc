"""Sweeps on SLURM: submit.py submits them, job.py watches one run, status.py shows their states. Imports no torch."""
