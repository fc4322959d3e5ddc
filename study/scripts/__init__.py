"""Measurements that were made once for the study, one figure or table each."""
