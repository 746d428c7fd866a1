"""Records, what they go through, and the pipeline that runs it."""
