"""The stages of a pipeline, and the engines that run them with an echo."""

from echo_jax.lazy import door

__getattr__ = door(__name__, {"evaluation": ["eval_batches"], "stages": ["Stages"]})
