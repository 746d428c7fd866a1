"""What XLA makes of an update, what that costs, and what it is told."""
