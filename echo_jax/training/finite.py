"""Whether a run is finite, and the errors of a run that is not."""

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["NonFiniteLossError", "OverflowsError", "is_finite"]


class NonFiniteLossError(FloatingPointError):
    """A run went to NaN or infinity; no such state was saved.

    Attributes:
      update: The first update whose loss is not finite. If all losses are finite: the
        update after which the state is not.
    """

    def __init__(self, what: str, update: int, saved: int | None):
        self.update = update
        super().__init__(
            f"{what} {update} is not finite{_saved(saved)}; use another "
            "--workdir with a lower --config.optim.lr or --config.optim.clip_norm=1.0"
        )


class OverflowsError(NonFiniteLossError):
    """A run with a loss scale has skipped too many updates; `update` is the last."""

    def __init__(self, update: int, factor: float, saved: int | None):
        self.update = update
        FloatingPointError.__init__(
            self,
            f"the loss or the gradient of update {update} is not finite, as of those "
            "before it that were skipped, and the loss scale is down to "
            f"{factor:g}{_saved(saved)}; use another --workdir with "
            "--config.precision.compute=bfloat16, a lower --config.optim.lr or, of a "
            "static scale, a lower --config.precision.init",
        )


def _saved(update: int | None) -> str:
    if update is None:
        return ""
    return f"; the last checkpoint, of update {update}, is finite"


def is_finite(state: Any) -> jax.Array:
    """Returns whether all floats of a pytree are finite, ``bool[]``; to be jitted."""
    floats = [
        x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in floats]))
