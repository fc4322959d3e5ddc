"""Extends TRL: the trainer, its passes and its options."""
