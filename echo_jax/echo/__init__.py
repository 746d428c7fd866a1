"""The echo library: plans, stores, and backends for host, Grain and tf.data."""
