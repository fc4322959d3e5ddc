"""Reads run directories: `load` makes tidy tables of them, `samples` and `show` read the rollouts that they keep."""
