"""Devices and processes: who is who, where arrays lie, and how all end together."""
