"""Finds, builds and loads policies: any transformers model by name, or the tiny one that is warm-started here."""
