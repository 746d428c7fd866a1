"""Devices and processes: identity, array placement, and a common end."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {"distributed": ["connected"], "sharding": ["make_mesh", "param_shardings"]},
)
