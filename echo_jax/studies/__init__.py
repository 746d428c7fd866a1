"""Comparisons of runs, made from the files of finished runs.

Nothing here imports jax: a report can be made on any machine that has the folders.
"""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "figures": ["mean_curve", "write_figure"],
        "runs": ["Run", "Study", "StudyError", "read_run", "read_runs", "read_study"],
        "scaling": ["read_scaling"],
        "seeds": ["read_seeds"],
        "table": ["variant_rows", "study_report"],
    },
)
