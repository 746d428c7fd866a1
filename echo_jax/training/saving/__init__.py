"""What a run saves, and what begins with it: checkpoints, models, weights."""
