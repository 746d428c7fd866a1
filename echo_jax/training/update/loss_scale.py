"""A loss scale: it keeps small gradients from being rounded to 0 in half precision.

The loss is multiplied by the scale, and the gradient is divided by it. If a value in
between overflows, the gradient is not finite, and the update is skipped. It changes
nothing that is trained. It still counts, because data, randomness and schedules depend
on its number. A dynamic scale is then halved. It doubles again after many updates
without a skip (Micikevicius et al. 2018, section 3.2).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from echo_jax.config.run import RunSpec

# So many skipped updates in a row end a run.
_MOST_IN_A_ROW = 20


@dataclass(frozen=True)
class Precision:
    """The part of the precision that is compiled into an update; hashable."""

    params: str = "float32"  # The type in which parameters are stored.
    loss_scale: str = "none"  # none | static | dynamic

    @classmethod
    def from_config(cls, config: RunSpec) -> "Precision":
        return cls(config.precision.params, config.precision.loss_scale)


class LossScale(struct.PyTreeNode):
    """The state of a loss scale; a part of the training state."""

    # The scale, float32[]; 0 while it is the config's, which is an input.
    changed: jax.Array
    finite_in_a_row: jax.Array  # Used updates since it changed, int32[].
    skipped_in_a_row: jax.Array  # Skipped updates up to the last one, int32[].
    skipped_updates: jax.Array  # All skipped updates, int32[].

    @classmethod
    def at_start(cls) -> "LossScale":
        zeros = (jnp.zeros((), jnp.int32) for _ in range(3))
        return cls(jnp.zeros((), jnp.float32), *zeros)

    def factor(self, numbers: jax.Array) -> jax.Array:
        """Returns the factor of the next loss, ``float32[]``."""
        return jnp.where(self.changed > 0, self.changed, numbers[0])


class ScaleReport(NamedTuple):
    """The factor of an update, float32[], and all skipped updates, int32[]; a row's."""

    loss_scale: jax.Array
    skipped_updates: jax.Array


# One array, because a call of a compiled function takes 0.2 us for each. A static scale
# has the minimum 0, so it does not fail for being small.
def scale_numbers(config: RunSpec) -> jax.Array | None:
    """Returns the first scale, its growth interval and its minimum, float32[3]."""
    precision = config.precision
    if precision.loss_scale == "none":
        return None
    least = precision.min_scale if precision.loss_scale == "dynamic" else 0.0
    numbers = [precision.init, precision.growth, least]
    return jnp.asarray(np.array(numbers, np.float32))


def unscale(tree: Any, factor: jax.Array | None) -> Any:
    """Divides a scaled loss or gradient by the factor, in float32."""
    # Half precision would lose again the digits that the scale has kept.
    if factor is None:
        return tree
    return jax.tree.map(lambda x: x.astype(jnp.float32) / factor, tree)


# A dynamic scale doubles at the first used update after `growth` others in a row, as
# flax.training.dynamic_scale does. A skipped update halves it. The run has failed if an
# update is skipped at the minimum, or if it is the last of _MOST_IN_A_ROW.
def adjust(
    state: LossScale, numbers: jax.Array, is_used: jax.Array, *, is_dynamic: bool
) -> tuple[LossScale, jax.Array]:
    """Returns the state after an update, and whether the run has failed, bool[]."""
    factor, growth, smallest = state.factor(numbers), numbers[1], numbers[2]
    grows = is_used & (state.finite_in_a_row.astype(jnp.float32) >= growth)
    doubled = jnp.where(jnp.isfinite(2 * factor), 2 * factor, factor)
    halved = jnp.maximum(factor / 2, smallest)
    moved = jnp.where(is_used, jnp.where(grows, doubled, factor), halved)
    skipped_in_a_row = jnp.where(is_used, 0, state.skipped_in_a_row + 1)
    new = LossScale(
        changed=moved if is_dynamic else state.changed,
        finite_in_a_row=jnp.where(is_used & ~grows, state.finite_in_a_row + 1, 0),
        skipped_in_a_row=skipped_in_a_row,
        skipped_updates=state.skipped_updates + jnp.int32(~is_used),
    )
    failed = skipped_in_a_row >= _MOST_IN_A_ROW
    return new, failed | (~is_used & (factor <= smallest))
