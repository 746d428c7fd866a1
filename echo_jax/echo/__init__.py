"""The echo library: plans, stores, and backends for host, Grain and tf.data."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "driver": ["Turn"],
        "finite": ["is_finite", "what_is_bad"],
        "keys": ["mix"],
        "tree": ["Structure", "flatten", "tree_map"],
    },
)
