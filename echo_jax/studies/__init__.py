"""Comparisons of runs, made from the files of finished runs.

Nothing here imports jax: a report can be made on any machine that has the folders.
"""
