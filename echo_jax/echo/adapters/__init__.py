"""Echo inside of other pipelines: Grain and tf.data."""
