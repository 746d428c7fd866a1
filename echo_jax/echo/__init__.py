"""The echo library: plans, stores, and backends for host, Grain and tf.data."""

from echo_jax.lazy import door

__getattr__ = door(__name__, {"shard": ["DataShard", "SINGLE"]})
