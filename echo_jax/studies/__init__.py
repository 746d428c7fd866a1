"""Comparisons of runs, made from the files that training leaves behind.

Nothing here imports jax: a report is made wherever the folders are.
"""
