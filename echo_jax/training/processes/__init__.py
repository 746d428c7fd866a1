"""Devices and processes: identity, array placement, and a common end."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "distributed": ["connected"],
        "peers": ["Peers"],
        "sharding": ["make_mesh", "param_shardings", "put_batch"],
        "watchdog": ["Watchdog"],
    },
)
