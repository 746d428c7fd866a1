"""Whether a run is finite still, and the error of one that is not."""

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["NonFiniteLossError", "is_finite"]


class NonFiniteLossError(FloatingPointError):
    """A run went to NaN or infinity; nothing of that was saved.

    Attributes:
      update: The first update whose loss is not finite; if all losses are finite,
        the update after which the state is not.
    """

    def __init__(self, what: str, update: int, saved: int | None):
        self.update = update
        last = f"the last checkpoint, of update {saved}, is finite" if saved else ""
        super().__init__(
            f"{what} {update} is not finite{last and '; ' + last}; use another "
            "--workdir with a lower --config.optim.lr or --config.optim.clip_norm=1.0"
        )


def is_finite(state: Any) -> jax.Array:
    """Returns whether all floats of a pytree are finite, ``bool[]``; to be jitted."""
    floats = [
        x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in floats]))
