"""Says what a run would need, by arithmetic: memory of a GPU by part, time, disk. experiments/plan.py prints it."""
