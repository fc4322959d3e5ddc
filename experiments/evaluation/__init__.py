"""Evaluates policies outside of training, for experiments/evaluate.py."""
