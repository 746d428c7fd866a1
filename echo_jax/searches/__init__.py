"""Studies that search: what is tried, how trials are made, and what they show."""
