"""Learning rates over updates, from numbers that are inputs of the compiled step.

All schedules but those of optax are functions of traced numbers. So runs that differ
only in these numbers share a compilation. Every schedule gives a fraction of the peak,
which ``optim.lr`` and ``optim.scale`` set:

- ``constant``, ``linear``, ``cosine``: from the peak to ``end_fraction`` of it.
- ``piecewise``: multiplied by ``boundary_scale`` at each of the ``boundaries``.
- ``slow_start``: the ``fractions`` between the ``boundaries``, which by default are at
  40, 70 and 85 ninetieths of the run (Akiba et al. 2017).
- ``onecycle``: from ``start_fraction`` to the peak at the part ``peak_at`` of all
  updates, and down to ``end_fraction``, each along half a cosine (Smith and Topin
  2019).
- ``cyclic``: between ``start_fraction`` and the peak, in triangles of
  ``cycle_updates`` (Smith 2017, section 3.2).
- ``warmup_stable_decay``: the peak until the last ``cooldown_updates``, which go to
  ``end_fraction`` in a line (Hu et al. 2024, MiniCPM).
- ``optax.NAME``: the peak times the value of an optax schedule.

All but ``onecycle`` and ``cyclic`` begin with ``warmup_updates`` that rise in a line,
from ``start_fraction`` if it is not 0 (Goyal et al. 2017, section 2.2).

No update has a learning rate of 0. One update has the peak, and one has the end: the
last update of the warm-up is the first at the peak. ``onecycle`` is the same as in
optax: the update after the last one would have its end.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from echo_jax.config import Config
from echo_jax.config.optimizer import SLOW_START_ENDS, optax_schedule

__all__ = ["Numbers", "learning_rate", "schedule_numbers", "share_of_rise"]

Numbers = dict[str, jax.Array]
"""By name, ``float32[]`` or ``int32[]``; ``boundaries`` is ``int32[N]`` and
``fractions`` is ``float32[M]``."""


def schedule_numbers(config: Config) -> dict[str, Any]:
    """Returns the numbers of a config that `learning_rate` needs, by name."""
    optim = config.optim
    length = optim.decay_updates or config.updates
    ratio = config.batch_size / optim.reference_batch
    scaling = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}
    boundaries = tuple(optim.boundaries)
    if optim.schedule == "slow_start" and not boundaries:
        boundaries = tuple(round(part * length) for part in SLOW_START_ENDS)
    names = ("start_fraction", "end_fraction", "boundary_scale", "peak_at")
    names += ("warmup_updates", "cycle_updates", "cooldown_updates", "fractions")
    return {
        **{name: optim[name] for name in names},
        "lr": optim.lr * scaling[optim.scale],
        "decay_updates": length,
        "boundaries": boundaries,
    }


def learning_rate(
    schedule: str, numbers: Numbers, update: jax.Array | int, *, args: str = "{}"
) -> jax.Array:
    """Returns the learning rate of an update, counted from 0, ``float32[]``.

    Example:
      A linear schedule with lr 1, 2 warm-up updates of 6, and end fraction 0.2
      trains its updates with 0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2, ...
    """
    warmup, total = numbers["warmup_updates"], numbers["decay_updates"]
    start, end = numbers["start_fraction"], numbers["end_fraction"]
    last_warm = jnp.maximum(warmup - 1, 0)
    left = jnp.maximum(total - 1 - last_warm, 1)
    passed = (update >= numbers["boundaries"]).sum()

    def done(after: jax.Array, updates: jax.Array) -> jax.Array:
        return jnp.clip((update - after) / updates, 0.0, 1.0)

    match schedule:
        case "constant":
            scale = jnp.ones(())
        case "linear":
            scale = (1 - end) * (1 - done(last_warm, left)) + end
        case "cosine":
            falling = 0.5 * (1 + jnp.cos(jnp.pi * done(last_warm, left)))
            scale = (1 - end) * falling + end
        case "piecewise":
            scale = numbers["boundary_scale"] ** passed
        case "slow_start":
            scale = numbers["fractions"][passed]
        case "warmup_stable_decay":
            cooldown = numbers["cooldown_updates"]
            scale = 1 - (1 - end) * done(total - 1 - cooldown, cooldown)
        case "cyclic":
            half = numbers["cycle_updates"] / 2
            scale = start + (1 - start) * (1 - jnp.abs(update / half % 2 - 1))
        case "onecycle":
            lowest = jnp.where(update < numbers["peak_at"] * total, start, end)
            scale = lowest + (1 - lowest) * share_of_rise(numbers, update)
        case name:
            scale = optax_schedule(name, args)(update)
    rising = jnp.where(
        start > 0,
        start + (1 - start) * update / jnp.maximum(last_warm, 1),
        (update + 1) / jnp.maximum(warmup, 1),
    )
    scale = jnp.where(update < last_warm, rising, scale)
    return (numbers["lr"] * scale).astype(jnp.float32)


def share_of_rise(numbers: Numbers, update: jax.Array | int) -> jax.Array:
    """Returns how near to its peak ``onecycle`` is: 0 at both ends, 1 at the peak."""
    total = numbers["decay_updates"]
    peak = numbers["peak_at"] * total
    down = (update - peak) / (total - peak)
    from_peak = jnp.where(update < peak, 1 - update / peak, jnp.clip(down, 0.0, 1.0))
    return 0.5 * (1 + jnp.cos(jnp.pi * from_peak))
