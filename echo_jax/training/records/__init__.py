"""What a run counts, writes down and shows of itself."""
