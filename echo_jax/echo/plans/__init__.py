"""The plans of an echo: which fresh items are taken, and who is used when."""
