"""Echo as a stage of other pipelines: Grain and tf.data."""
