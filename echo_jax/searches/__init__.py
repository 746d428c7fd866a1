"""Studies that search: their plan, their trials, and their comparison."""
