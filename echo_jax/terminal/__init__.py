"""The output of a command while it runs, and its end."""
