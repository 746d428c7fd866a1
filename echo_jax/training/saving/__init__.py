"""Saved parts of a run, and runs that begin with them: checkpoints, models, weights."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "checkpoint": ["Checkpoints", "DamagedCheckpointError"],
        "hashes": ["checksums", "params_sha256"],
        "weights": ["flat_arrays", "read_weights", "write_weights"],
    },
)
