"""The browser of rollouts: one self-contained page on which the tokens of kept prompt groups are looked at."""
