"""The counts, files and display of a run."""
