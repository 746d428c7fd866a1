"""Devices and processes: identity, array placement, and a common end."""
