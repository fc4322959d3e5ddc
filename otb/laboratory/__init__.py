"""The variance laboratory: the variance of the true gradient for every estimator, at one checkpoint of a policy.

`sampling` draws rollouts, `scores` takes the exact score vectors of their tokens, `estimators` turns baselines into
group gradients, `moments` into unbiased statistics of them, `oracle` bounds what any baseline of the prefix can reach.
Called by experiments/variance.py.
"""
