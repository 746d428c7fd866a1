"""The counts, files and display of a run."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "environment": ["claim_workdir", "code_commit"],
        "loggers": ["scalars_of"],
        "metrics": ["first_to_meet", "train_metrics"],
        "progress": ["Progress"],
        "runfiles": ["MetricsFile"],
    },
)
