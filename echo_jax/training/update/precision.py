"""The types in which parameters are stored and the optimizer computes.

A model computes in the type of ``config.precision.compute``: see
`echo_jax.workloads.assembly.compute_dtype`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from echo_jax.config import Config

__all__ = ["Precision", "as_float32", "in_float32"]


@dataclass(frozen=True)
class Precision:
    """The part of the precision that is compiled into an update; hashable.

    Attributes:
      params: The type in which parameters are stored between updates.
      loss_scale: ``"none"``, ``"static"`` or ``"dynamic"``.
    """

    params: str = "float32"
    loss_scale: str = "none"

    @classmethod
    def from_config(cls, config: Config) -> "Precision":
        return cls(config.precision.params, config.precision.loss_scale)

    def stored(self, params: Any) -> Any:
        """Returns parameters in the type in which they are stored."""
        return jax.tree.map(lambda x: x.astype(self.params), params)


def as_float32(tree: Any) -> Any:
    """Returns a pytree with all of its arrays in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


# In half precision the norm of a gradient under- or overflows: in float16 the square of
# 1e-4 is 0, and a sum of 70,000 ones is infinite.
def in_float32(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Returns an optimizer that gets gradients and parameters in float32."""

    def init(params: optax.Params) -> optax.OptState:
        return optimizer.init(as_float32(params))

    def update(
        updates: optax.Updates, state: optax.OptState, params: Any = None
    ) -> tuple[optax.Updates, optax.OptState]:
        return optimizer.update(as_float32(updates), state, as_float32(params))

    return optax.GradientTransformation(init, update)
