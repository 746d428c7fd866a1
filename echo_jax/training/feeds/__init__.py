"""Feeds: the input of updates, from the host or from a buffer on the devices."""
