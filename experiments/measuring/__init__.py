"""Runs the variance laboratory and the forecast, for experiments/variance.py and experiments/forecast.py."""
