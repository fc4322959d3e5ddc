"""Holds one-off measurements of the study, one per figure or table."""
