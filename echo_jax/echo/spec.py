"""What an echo is to do: one frozen, validated description for all backends."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from echo_jax.echo.keys import fingerprint
from echo_jax.echo.schedule import Factor, FactorByItem, Schedule, as_schedule

__all__ = ["EchoSpec", "Order"]

Order = Literal["consecutive", "shuffle", "shuffle_buffer", "spread"]

# Goes up whenever the same spec yields another sequence than before, or a state
# means something else: an older state is then refused.
_SEQUENCE_VERSION = 1


@dataclass(frozen=True)
class EchoSpec:
    """Describes an echo; the same description works on every backend.

    Attributes:
      factor: Uses per fresh item, at least 1: a constant (``2``, ``2.5``,
        ``"7/3"``), a piecewise constant over fresh items (``{0: 1, 10_000: 4}``),
        or a `FactorByItem`. Exact: item k of a constant e is used
        floor((k+1)e) - floor(ke) times.
      buffer: Fresh items kept, in items (never bytes, never repeats). More of it
        means a longer lag between the uses of an item, which makes repeats worth
        more (Choi et al. 2019, section 3.5). ``consecutive`` keeps one item and
        leaves this at 1. ``shuffle_buffer`` counts uses, as the paper's does: they
        belong to so many items at most, and to fewer at a factor above 1.
      order: How uses are laid out in time. ``consecutive``: back to back.
        ``shuffle``: at random within a bounded delay: a use of item k comes after
        item k and before item k + buffer, so that a restore re-reads two buffers at
        most. ``shuffle_buffer``: the algorithm of Choi et al. and of tf.data:
        repeated, then through a buffer of ``buffer`` uses of which a random one
        leaves. Nothing bounds how long a use stays, so a restore re-reads about
        buffer * (ln buffer + 2) / factor items. ``spread``: uses of an item evenly
        far apart, none twice in a batch, and the upstream asked at a constant rate.
      batch_size: How many consecutive uses make one training batch. It is the
        unit of what ``spread`` promises, whether or not the echo stacks them.
      seed: Names the random order. Hosts with the same seed agree.

    Raises:
      TypeError, ValueError: If a field is not of its kind or out of its range.

    Example:
      >>> EchoSpec(factor=2.5, buffer=4096, order="spread", batch_size=64).schedule
      Schedule(starts=(0,), factors=(Fraction(5, 2),), by_item=None, denominator=2)
    """

    factor: Factor | FactorByItem = 1
    buffer: int = 1
    order: Order = "consecutive"
    batch_size: int = 1
    seed: int = 0
    schedule: Schedule = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "schedule", as_schedule(self.factor))
        for name, least in (("buffer", 1), ("batch_size", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r} must be an int; give {name}={least}")
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        if self.order not in get_args(Order):
            raise ValueError(
                f"order={self.order!r} is unknown; use one of "
                f"{', '.join(map(repr, get_args(Order)))}"
            )

    @property
    def fingerprint(self) -> int:
        """An integer that another sequence of uses does not share, below 2^48.

        A function as factor counts with its bound alone.
        """
        return fingerprint(
            _SEQUENCE_VERSION,
            self.order,
            self.buffer,
            self.batch_size,
            self.seed,
            self.schedule.starts,
            [str(factor) for factor in self.schedule.factors],
            self.schedule.by_item is not None,
        )
