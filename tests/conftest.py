"""One CPU backend with 8 devices for all tests; set before it starts."""

import os

# Virtual CPU devices that wait for each other need threads: with fewer than twice
# as many threads as devices, collectives can hang.
os.environ["NPROC"] = "16"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from absl import flags

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Grain's worker processes read absl flags; there is no absl.app.run in a test.
flags.FLAGS.mark_as_parsed()
