"""Saved parts of a run, and runs that begin with them: checkpoints, models, weights."""
