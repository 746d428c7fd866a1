"""In which types parameters are stored and the optimizer computes.

What a model computes in is its own: ``config.precision.compute``, see
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
    """What of the precision is compiled into an update, beside what the model is of.

    Hashable, as `echo_jax.training.update.optim.Optimizer` is. The numbers of a loss
    scale are inputs: see `echo_jax.training.update.loss_scale.scale_numbers`.

    Attributes:
      params: The type that parameters are stored in between updates.
      loss_scale: ``"none"``, ``"static"`` or ``"dynamic"``.
    """

    params: str = "float32"
    loss_scale: str = "none"

    @classmethod
    def from_config(cls, config: Config) -> "Precision":
        """Returns the precision of a checked training config."""
        return cls(config.precision.params, config.precision.loss_scale)

    def stored(self, params: Any) -> Any:
        """Returns parameters in the type that they are stored in.

        Example:
          >>> Precision("bfloat16").stored({"w": jnp.ones(2)})["w"].dtype
          dtype(bfloat16)
        """
        return jax.tree.map(lambda x: x.astype(self.params), params)


def as_float32(tree: Any) -> Any:
    """Returns a pytree with all of its arrays in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def in_float32(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Has an optimizer see gradients and parameters, and keep its state, in float32.

    In half precision the norm of a gradient under- or overflows: in float16 the square
    of 1e-4 is 0, and a sum of 70,000 ones is infinite.
    """

    def init(params: optax.Params) -> optax.OptState:
        return optimizer.init(as_float32(params))

    def update(
        updates: optax.Updates, state: optax.OptState, params: Any = None
    ) -> tuple[optax.Updates, optax.OptState]:
        return optimizer.update(as_float32(updates), state, as_float32(params))

    return optax.GradientTransformation(init, update)
