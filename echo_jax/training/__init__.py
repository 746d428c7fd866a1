"""Training of a workload: sharded, resumable, and timed. Knows none by name."""

from echo_jax.training.interrupt import Interrupted
from echo_jax.training.loop import train
from echo_jax.training.measure import Rates, calibrate
from echo_jax.training.trainer import NonFiniteLossError

__all__ = ["Interrupted", "NonFiniteLossError", "Rates", "calibrate", "train"]
