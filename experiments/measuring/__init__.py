"""Runs the variance laboratory, for experiments/variance.py."""
