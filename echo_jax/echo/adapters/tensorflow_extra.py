"""Imports TensorFlow, or says which extra to install. Other modules import it here."""

try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(
        "tf.data needs TensorFlow, which is not installed; run "
        "pip install 'echo-jax[tfdata]'"
    ) from error

__all__ = ["tf"]
