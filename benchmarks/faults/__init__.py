"""Campaigns of faults: what a disk, a signal or a stranger does, again and again."""
