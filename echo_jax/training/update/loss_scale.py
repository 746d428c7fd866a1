"""A loss scale: it keeps small gradients above what half precision rounds to 0.

The loss is multiplied by it and the gradient divided, so that only what lies between
them is larger. Where that overflows the gradient is not finite, and the update is
skipped: it counts, for data, randomness and schedules hang on its number, and leaves
all that is trained as it was. A dynamic scale is halved then, and doubles again after
many updates without (Micikevicius et al. 2018, section 3.2).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from echo_jax.config import Config

__all__ = [
    "MOST_IN_A_ROW",
    "LossScale",
    "ScaleReport",
    "adjust",
    "scale",
    "scale_numbers",
    "select",
    "unscale",
]

MOST_IN_A_ROW = 20
"""So many skipped updates in a row end a run: what else would help it?"""

# Those of `scale_numbers`.
_INIT, _GROWTH, _MIN_SCALE = range(3)


class LossScale(struct.PyTreeNode):
    """Where a loss scale stands; a part of the training state.

    Attributes:
      changed: The scale, ``float32[]``; 0 as long as it is that of the config, which
        is not compiled in.
      finite_in_a_row: Updates that were not skipped since it last changed, ``int32[]``.
      skipped_in_a_row: Updates that were, up to the last one, ``int32[]``.
      skipped_updates: All that were, ``int32[]``.
    """

    changed: jax.Array
    finite_in_a_row: jax.Array
    skipped_in_a_row: jax.Array
    skipped_updates: jax.Array

    @classmethod
    def at_start(cls) -> "LossScale":
        """Returns where it stands before the first update."""
        zeros = (jnp.zeros((), jnp.int32) for _ in range(3))
        return cls(jnp.zeros((), jnp.float32), *zeros)

    def factor(self, numbers: jax.Array) -> jax.Array:
        """Returns what the next loss is multiplied by, ``float32[]``.

        Args:
          numbers: From `scale_numbers`.
        """
        return jnp.where(self.changed > 0, self.changed, numbers[_INIT])


class ScaleReport(struct.PyTreeNode):
    """What the host may read of a loss scale after an update.

    Attributes:
      factor: What the update's loss was multiplied by, ``float32[]``.
      skipped_updates: Those that were skipped since the start, ``int32[]``.
    """

    factor: jax.Array
    skipped_updates: jax.Array

    def row(self) -> dict[str, float]:
        """Returns its part of a logged row, of numbers on the host."""
        return {
            "loss_scale": float(self.factor),
            "skipped_updates": int(self.skipped_updates),
        }


def scale_numbers(config: Config) -> jax.Array | None:
    """Returns a config's numbers of a loss scale, side by side; None if it has none.

    A call of a compiled function takes 0.2 us for each array that it is given.

    Args:
      config: A checked training config.

    Returns:
      The first scale, after how many updates it grows, and the smallest,
      ``float32[3]``. A static one stays where it is, however small.
    """
    precision = config.precision
    if precision.loss_scale == "none":
        return None
    least = precision.min_scale if precision.loss_scale == "dynamic" else 0.0
    return jnp.array([precision.init, precision.growth, least], jnp.float32)


def scale(loss: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Returns the loss whose gradient is computed; as it is without a factor."""
    return loss if factor is None else loss * factor


def unscale(tree: Any, factor: jax.Array | None) -> Any:
    """Undoes `scale` in what was computed of it: a loss, or a gradient.

    Args:
      tree: Of arrays of any floating-point type.
      factor: Of the scale; None without one.

    Returns:
      The tree in float32, since half precision would lose again what the scale has
      kept; as it is without a factor.
    """
    if factor is None:
        return tree
    return jax.tree.map(lambda x: x.astype(jnp.float32) / factor, tree)


def select(is_used: jax.Array, new: Any, old: Any) -> Any:
    """Returns a pytree as it is after an update, or as before a skipped one."""
    return jax.tree.map(lambda a, b: jnp.where(is_used, a, b), new, old)


def adjust(
    state: LossScale, numbers: jax.Array, is_used: jax.Array, *, is_dynamic: bool
) -> tuple[LossScale, jax.Array]:
    """Moves a scale on by an update.

    A dynamic one doubles with the first update that is used after as many in a row as
    it takes to grow, as `flax.training.dynamic_scale.DynamicScale` does, and is halved
    by one that is skipped.

    Args:
      state: Before the update.
      numbers: From `scale_numbers`.
      is_used: Whether the update is not skipped, ``bool[]``.
      is_dynamic: Whether the scale ever changes.

    Returns:
      The state after it, and whether the run has failed: the update is skipped though
      the scale is the smallest, or is the last of `MOST_IN_A_ROW`.
    """
    factor, smallest = state.factor(numbers), numbers[_MIN_SCALE]
    grows = is_used & (state.finite_in_a_row >= numbers[_GROWTH])
    doubled = jnp.where(jnp.isfinite(2 * factor), 2 * factor, factor)
    halved = jnp.maximum(factor / 2, smallest)
    moved = jnp.where(is_used, jnp.where(grows, doubled, factor), halved)
    skipped_in_a_row = jnp.where(is_used, 0, state.skipped_in_a_row + 1)
    new = LossScale(
        changed=moved if is_dynamic else state.changed,
        finite_in_a_row=jnp.where(is_used & ~grows, state.finite_in_a_row + 1, 0),
        skipped_in_a_row=skipped_in_a_row,
        skipped_updates=state.skipped_updates + ~is_used,
    )
    failed = skipped_in_a_row >= MOST_IN_A_ROW
    return new, failed | (~is_used & (factor <= smallest))
