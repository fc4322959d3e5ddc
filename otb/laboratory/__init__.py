"""The variance laboratory: it measures the variance of every estimator's gradient, at one checkpoint of a policy.

`sampling` draws rollouts, `scores` takes the exact score vectors of their tokens, `estimators` turns baselines into
group gradients, `moments` and `statistics` into unbiased statistics of them, `oracle` bounds what any baseline of the
prefix can reach. Called by experiments/variance.py.
"""
