"""Entry points of the experiments. `settings` checks a configuration without torch; `train` does the work."""
