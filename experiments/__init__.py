"""Makes runs: run.py and variance.py are the commands; train.py does the work, and is imported last (checks/)."""
