"""The orders of an echo: pure sequences of (fresh index, repeat), one file each.

An order is cut into rounds. A round follows from the seed, its own number and its
items' numbers of uses. So a few integers are enough to make it again at any time.

A new order is a file here, a line in `ORDERS`, its name in `echo_jax.echo.spec.Order`
and its bounds in `echo_jax.echo.laws.bounds`.
"""

from collections.abc import Callable

from echo_jax.echo.orders.base import OrderRounds
from echo_jax.echo.orders.consecutive import Consecutive
from echo_jax.echo.orders.shuffle_buffer import ShuffleBuffer
from echo_jax.echo.orders.spread import Spread
from echo_jax.echo.orders.window_shuffle import WindowShuffle
from echo_jax.echo.spec import EchoSpec

__all__ = ["ORDERS", "rounds_of"]


# How the rounds of each order are made, by its name.
ORDERS: dict[str, Callable[..., OrderRounds]] = {
    "consecutive": Consecutive,
    "window_shuffle": WindowShuffle,
    "shuffle_buffer": ShuffleBuffer,
    "spread": Spread,
}


def rounds_of(spec: EchoSpec) -> OrderRounds:
    """Returns the order that a spec names; ValueError if its buffer does not fit."""
    # Without repeats there is nothing to spread.
    is_flat = spec.order == "spread" and spec.schedule.max_factor == 1
    make = ORDERS["consecutive" if is_flat else spec.order]
    return make(spec.schedule, spec.buffer, spec.batch_size, spec.seed)
