"""What an echo is to do: one frozen, validated description for all stores.

There are three, by who decides when an item is used again: `EchoSpec` by the item's
number, `AdaptiveSpec` by what is ready, `StochasticSpec` by a coin.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from echo_jax.echo.arguments import integer
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.keys import fingerprint
from echo_jax.echo.load_schedule import LoadSchedule
from echo_jax.echo.schedule import Factor, FactorByItem, Schedule, as_schedule

__all__ = [
    "AdaptiveSpec",
    "AnySpec",
    "EchoSpec",
    "Order",
    "StochasticSpec",
    "check_spec",
    "num_outputs",
]

Order = Literal["consecutive", "shuffle", "shuffle_buffer", "spread"]

# Goes up whenever the same spec yields another sequence than before, or a state
# means something else: an older state is then refused.
_SEQUENCE_VERSION = 1


@dataclass(frozen=True)
class EchoSpec:
    """Describes a fixed echo: item k is used as often as its number says.

    For a producer of a steady rate: exact, the same in every run, and its repeats lie
    as far apart as the buffer allows.

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

    # A piecewise factor is a mapping, which has no hash.
    factor: Factor | FactorByItem = field(default=1, hash=False)
    buffer: int = 1
    order: Order = "consecutive"
    batch_size: int = 1
    seed: int = 0
    schedule: Schedule = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "schedule", as_schedule(self.factor))
        _check_integers(self, buffer=1, batch_size=1, seed=0)
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


@dataclass(frozen=True)
class AdaptiveSpec:
    """Describes an adaptive echo: fresh if ready, else the longest unused, else wait.

    For a producer that stalls or drifts, or whose rate nobody knows: while data comes
    in time nothing is repeated. What it decided is kept in a `DecisionLog`.

    Attributes:
      cap: Uses after which an item is not used any more, at least 1. Past some number
        of uses a repeat is worth less than nothing (Choi et al. 2019, section 3.3).
        At R it leaves nothing to choose from, and whole batches are repeated back to
        back: give more, such as twice R (docs/results.md, "When to load?").
      buffer: Fresh items kept, in items: the last so many.
      batch_size: How many uses make one training batch, which is decided at once.
      seed: Names the random choice among the longest unused.
      replay: Decisions that are repeated, such as the ``log`` of an earlier echo;
        after their end decisions are made from what is ready.

    Raises:
      TypeError, ValueError: If a field is not of its kind or out of its range.

    Example:
      >>> AdaptiveSpec(cap=2, buffer=8, batch_size=4, replay=[True, False]).replay
      <DecisionLog of 2 decisions, 1 of them yes>
    """

    cap: int = 4
    buffer: int = 1
    batch_size: int = 1
    seed: int = 0
    replay: DecisionLog | None = None

    def __post_init__(self):
        _check_integers(self, cap=1, buffer=1, batch_size=1, seed=0)
        if self.replay is None or isinstance(self.replay, DecisionLog):
            return
        if not isinstance(self.replay, Sequence):
            raise TypeError(
                f"replay={self.replay!r} must be a DecisionLog, such as the log of an "
                "earlier echo, or a list of decisions"
            )
        object.__setattr__(self, "replay", DecisionLog(self.replay))


@dataclass(frozen=True)
class StochasticSpec:
    """Describes a stochastic echo: load a fresh batch with some probability.

    For studies of schedules: the echo that theory speaks of, where some items are
    never repeated and others often.

    Attributes:
      load: How likely every batch is a fresh one. The first always is.
      buffer: Items that repeats are drawn from: the last so many.
      batch_size: Items of a batch.
      seed: Names the random choices.

    Raises:
      TypeError, ValueError: If a field is not of its kind or out of its range.

    Example:
      >>> StochasticSpec(LoadSchedule(start=0.5, end=0.5), buffer=64, batch_size=8).seed
      0
    """

    load: LoadSchedule = field(default_factory=LoadSchedule)
    buffer: int = 1
    batch_size: int = 1
    seed: int = 0

    def __post_init__(self):
        if not isinstance(self.load, LoadSchedule):
            raise TypeError(
                f"load={self.load!r} must be a LoadSchedule, such as "
                "LoadSchedule(start=0.5, end=0.5)"
            )
        _check_integers(self, buffer=1, batch_size=1, seed=0)


AnySpec = EchoSpec | AdaptiveSpec | StochasticSpec
"""The description of an echo of any mode."""


def _check_integers(spec: AnySpec, **least: int) -> None:
    for name, bound in least.items():
        object.__setattr__(spec, name, integer(name, getattr(spec, name), bound))


def num_outputs(
    spec: AnySpec | None, num_items: int | None, *, batch: bool, drop_remainder: bool
) -> int:
    """Returns how many outputs an echo makes, or NotImplemented if it is not known.

    Example:
      >>> num_outputs(EchoSpec(2.5, batch_size=4), 3, batch=True, drop_remainder=False)
      2
    """
    if num_items is None or not isinstance(spec, EchoSpec):
        return NotImplemented
    uses = spec.schedule.total(num_items)
    if uses is None or uses > sys.maxsize:
        return NotImplemented
    size = spec.batch_size if batch else 1
    return uses // size if drop_remainder else -(-uses // size)


def check_spec(spec: Any) -> None:
    """Refuses what does not describe an echo.

    Raises:
      TypeError: It is not a spec.
    """
    if not isinstance(spec, AnySpec):
        is_factor = isinstance(spec, int | float | str) and not isinstance(spec, bool)
        fix = f"ej.EchoSpec(factor={spec!r})" if is_factor else "ej.EchoSpec(factor=2)"
        raise TypeError(
            "spec must be an EchoSpec, an AdaptiveSpec or a StochasticSpec, got "
            f"{spec!r:.80}. Use {fix}."
        )
