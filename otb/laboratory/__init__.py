"""The variance laboratory measures the gradient variance of every estimator at one checkpoint of a policy.

`sampling` draws rollouts, `scores` computes the exact score vectors of their tokens, `estimators` turns baselines into
group gradients, `moments` and `statistics` compute unbiased statistics of these gradients, and `oracle` bounds what a
baseline of the prefix can reach. experiments/variance.py calls it. `forecast` and `energies` tell what score norms
alone show, without gradients; experiments/forecast.py calls these.
"""
