"""Holds the code that extends TRL: the trainer, its passes and its options."""
