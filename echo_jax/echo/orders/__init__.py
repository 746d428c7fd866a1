"""The orders of an echo: pure sequences of (fresh index, repeat), one file each.

An order is cut into rounds. A round follows from the seed, its own number and its
items' numbers of uses. So a few integers are enough to make it again at any time.

A new order is a file here, and its class in `ORDERS`.
"""

from typing import Any

from echo_jax.echo.orders.base import Order, Piece
from echo_jax.echo.orders.consecutive import Consecutive
from echo_jax.echo.orders.shuffle_buffer import ShuffleBuffer
from echo_jax.echo.orders.spread import Spread
from echo_jax.echo.orders.window_shuffle import WindowShuffle

__all__ = ["ORDERS", "Order", "Piece", "rounds_of"]

# The class of each order, by its name.
ORDERS: dict[str, type[Order]] = {
    each.name: each for each in (Consecutive, WindowShuffle, ShuffleBuffer, Spread)
}


def rounds_of(spec: Any) -> Order:
    """Returns the order of an `EchoSpec`; ValueError if its buffer does not fit."""
    # Without repeats there is nothing to spread.
    is_flat = spec.order == "spread" and spec.schedule.max_factor == 1
    make = Consecutive if is_flat else ORDERS[spec.order or Consecutive.name]
    return make(spec.schedule, spec.buffer or 1, spec.batch_size or 1, spec.seed)
