"""Feeds: the input of updates, from the host or from a buffer on the devices."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "feed": ["HostBatching", "HostFeed", "JoinedBatches", "stacked"],
        "of_config": ["check_echo", "first_uses", "make_echo_spec", "open_feed"],
    },
)
