"""What experiments/variance.py measures."""
