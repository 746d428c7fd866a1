"""Whether a run is finite, and the error of a run that is not."""

from typing import Any

import jax
import jax.numpy as jnp


class NonFiniteLossError(FloatingPointError):
    """A run went to NaN or infinity; no such state was saved.

    Attributes:
      update: The first update whose loss is not finite. If all losses are finite: the
        update after which the state is not. With a loss scale: the last update that
        was skipped.
    """

    def __init__(
        self, what: str, update: int, saved: int | None, *, scale: float | None = None
    ):
        self.update = update
        said = f"{what} {update} is not finite"
        fix = "a lower --config.optim.lr or --config.optim.clip_norm=1.0"
        if scale is not None:
            said += ", as of those before it that were skipped, and the loss scale is "
            said += f"down to {scale:g}"
            fix = "--config.precision.compute=bfloat16, a lower --config.optim.lr or, "
            fix += "of a static scale, a lower --config.precision.init"
        if saved is not None:
            said += f"; the last checkpoint, of update {saved}, is finite"
        super().__init__(f"{said}; use another --workdir with {fix}")


def is_finite(state: Any) -> jax.Array:
    """Returns whether all floats of a pytree are finite, ``bool[]``; to be jitted."""
    floats = [
        x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in floats]))
