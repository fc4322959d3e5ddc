"""Holds what several test files share: groups, trainers, commands, a cluster. It contains no tests."""
