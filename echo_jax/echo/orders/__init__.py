"""The orders of an echo: pure sequences of (fresh index, repeat), one file each.

An order is cut into rounds, and everything in a round follows from the seed, the
round's number and the numbers of uses of the items in it. So a round can be made
anew at any time from a few integers.
"""

from echo_jax.echo.orders.base import OrderRounds
from echo_jax.echo.orders.consecutive import Consecutive
from echo_jax.echo.orders.shuffle import Shuffle
from echo_jax.echo.orders.spread import Spread
from echo_jax.echo.spec import EchoSpec

__all__ = ["rounds_of"]


def rounds_of(spec: EchoSpec) -> OrderRounds:
    """Returns the order that a spec names.

    Raises:
      ValueError: If the buffer is too small for ``spread`` without twins.
    """
    if spec.order == "shuffle":
        return Shuffle(spec.schedule, spec.buffer, spec.batch_size, spec.seed)
    if spec.order == "spread" and spec.schedule.max_factor > 1:
        return Spread(spec.schedule, spec.buffer, spec.batch_size, spec.seed)
    return Consecutive(spec.schedule, spec.batch_size)
