"""Feeds: the input of updates, from the host or from a buffer on the devices."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "feed": ["HostBatching", "HostFeed", "JoinedBatches", "stacked"],
        "uses": ["first_uses"],
        "of_config": ["check_echo", "make_echo_spec", "open_feed"],
    },
)
