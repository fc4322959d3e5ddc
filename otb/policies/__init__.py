"""Finds, builds and loads policies: any transformers model by name, or the tiny policy, which is warm-started here."""
