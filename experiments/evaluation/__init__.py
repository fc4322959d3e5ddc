"""Evaluates policies apart from their training, for experiments/evaluate.py."""
