"""Specs of an echo: frozen, validated descriptions for all stores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from echo_jax.echo.arguments import integer
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.keys import fingerprint
from echo_jax.echo.orders import ORDERS
from echo_jax.echo.schedule import (
    Factor,
    FactorByItem,
    FetchSchedule,
    Schedule,
    as_schedule,
)

# Goes up whenever the same spec yields another sequence than before, or a state
# means something else: an older state is then refused.
_SEQUENCE_VERSION = 1
# The value of a field that is left to the echo.
_LEFT_OUT: Any = None
_DEFAULTS = {"buffer": 1, "order": "consecutive", "batch_size": 1}


@dataclass(frozen=True)
class EchoSpec:
    """Describes a fixed echo: the number of an item determines its number of uses.

    It suits a producer of a steady rate. It is exact and the same in every run, and its
    repeats are as far apart as the buffer allows.

    The orders are:

    - ``consecutive``: the uses of an item are back to back.
    - ``window_shuffle``: at random within a bounded delay. A use of item k comes after
      item k and before item k + buffer, so a restore re-reads at most two buffers.
    - ``shuffle_buffer``: the algorithm of Choi et al. and of tf.data. Repeated uses
      leave a buffer of ``buffer`` uses at random. The time that a use stays has no
      limit, so a restore re-reads about buffer * (ln buffer + 2) / factor items.
    - ``spread``: uses of an item are evenly far apart, none twice in a batch, and the
      upstream is read at a constant rate.

    Attributes:
      factor: Uses per fresh item, at least 1: a constant (``2``, ``2.5``,
        ``"7/3"``), a piecewise constant over fresh items (``{0: 1, 10_000: 4}``),
        or a `FactorByItem`. It is exact: item k of a constant e is used
        floor((k+1)e) - floor(ke) times.
      buffer: Fresh items kept, in items (never bytes, never repeats). A larger buffer
        gives a longer lag between the uses of an item, which makes repeats worth more
        (Choi et al. 2019, section 3.5). ``consecutive`` keeps one item and leaves this
        at 1. ``shuffle_buffer`` counts uses, as in the paper: at a factor above 1 they
        belong to fewer items.
      order: The order of uses in time, as above.
      batch_size: How many consecutive uses make one training batch. ``spread`` keeps
        its promise for each such batch, whether or not the echo stacks them.
      seed: Names the random order. Hosts with the same seed agree.

    ``echo_batches`` chooses a ``buffer``, ``order`` or ``batch_size`` that is None: the
    loader's batch size, ``spread``, and 64 batches within a tenth of the free memory.
    Elsewhere None is 1, and ``consecutive``.

    Raises:
      TypeError, ValueError: A field has another type or is out of its range.

    Example:
      >>> EchoSpec(factor=2.5, buffer=4096, order="spread", batch_size=64).schedule
      Schedule(starts=(0,), factors=(Fraction(5, 2),), by_item=None, denominator=2)
    """

    # A piecewise factor is a mapping, which cannot be hashed.
    factor: Factor | FactorByItem = field(default=1, hash=False)
    buffer: int = _LEFT_OUT
    order: str = _LEFT_OUT
    batch_size: int = _LEFT_OUT
    seed: int = 0
    schedule: Schedule = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "schedule", as_schedule(self.factor))
        if self.order == "consecutive" and self.buffer is None:
            object.__setattr__(self, "buffer", 1)
        _check_integers(self)
        if self.order is not None and self.order not in list(ORDERS):
            known = (f"{name!r} ({each.sentence})" for name, each in ORDERS.items())
            raise ValueError(
                f"order={self.order!r} is unknown; use one of {', '.join(known)}"
            )

    @property
    def fingerprint(self) -> int:
        """Identifies the sequence of uses; of a function the bound alone."""
        return fingerprint(
            _SEQUENCE_VERSION,
            self.order.removeprefix("window_"),  # As states of earlier versions say.
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

    It suits a producer that stalls or drifts, or whose rate is unknown. While data
    comes in time nothing is repeated. A batch holds fresh items in the share in which
    they come. The echo ends with its loader. A `DecisionLog` keeps its decisions.

    Attributes:
      max_uses: Uses after which an item is not used any more, at least 1. Past some
        number of uses a repeat does harm (Choi et al. 2019, section 3.3). Where R is
        above it the echo waits, and keeps a reserve of items, so that repeats stay far
        apart.
      buffer: Fresh items kept: the last ``buffer`` ones. As in `EchoSpec` if None.
      batch_size: How many uses make one training batch, which is decided at once. As in
        `EchoSpec` if None.
      seed: As in `EchoSpec`, whose errors are the same.
      replay: Decisions to repeat, such as the ``log`` of an earlier echo. After their
        end the ready items decide.
      min_uses: Uses that every item gets before it gives way, from 1 to ``max_uses``,
        and that items have on average before fresh ones are taken. Above 1 it suits a
        loader on the step's own cores: its items are always ready, and each delays the
        step. Give twice as many ``max_uses``.

    Example:
      >>> AdaptiveSpec(max_uses=2, buffer=8, batch_size=4, replay=[True, False]).replay
      <DecisionLog of 2 decisions, 1 of them yes>
    """

    max_uses: int = 4
    buffer: int = _LEFT_OUT
    batch_size: int = _LEFT_OUT
    seed: int = 0
    replay: DecisionLog | None = None
    min_uses: int = 1

    def __post_init__(self):
        _check_integers(self, max_uses=1, min_uses=1)
        if self.min_uses > self.max_uses:
            raise ValueError(
                f"min_uses={self.min_uses} must be at most max_uses={self.max_uses}. "
                f"Use min_uses={self.max_uses}."
            )
        if not isinstance(self.replay, DecisionLog | None):
            if not isinstance(self.replay, Sequence):
                raise TypeError(
                    f"replay={self.replay!r} must be a DecisionLog, such as the log of "
                    "an earlier echo, or a list of decisions"
                )
            object.__setattr__(self, "replay", DecisionLog(self.replay))


@dataclass(frozen=True)
class StochasticSpec:
    """Describes a stochastic echo: fetch a fresh batch with some probability.

    It is for studies of schedules: theory studies this echo, in which some items are
    never repeated and others often.

    Attributes:
      fetch: The probability that a batch is a fresh one. The first batch always is.
      buffer: Items that repeats are drawn from: the last ``buffer`` ones. As in
        `EchoSpec` if None.
      batch_size: Items of a batch. As in `EchoSpec` if None.
      seed: As in `EchoSpec`, whose errors are the same.

    Example:
      >>> half = FetchSchedule(start=0.5, end=0.5)
      >>> StochasticSpec(half, buffer=64, batch_size=8).seed
      0
    """

    fetch: FetchSchedule = field(default_factory=FetchSchedule)
    buffer: int = _LEFT_OUT
    batch_size: int = _LEFT_OUT
    seed: int = 0

    def __post_init__(self):
        if not isinstance(self.fetch, FetchSchedule):
            raise TypeError(
                f"fetch={self.fetch!r} must be a FetchSchedule, such as "
                "FetchSchedule(start=0.5, end=0.5)"
            )
        _check_integers(self)


AnySpec = EchoSpec | AdaptiveSpec | StochasticSpec
Spec = TypeVar("Spec", bound=AnySpec)


def _check_integers(spec: AnySpec, **more: int) -> None:
    for name, bound in {"buffer": 1, "batch_size": 1, "seed": 0, **more}.items():
        if (value := getattr(spec, name)) is not None or name not in _DEFAULTS:
            object.__setattr__(spec, name, integer(name, value, bound))


def left_out(spec: AnySpec) -> set[str]:
    """Returns the names of the fields that are left to the echo."""
    return {name for name in _DEFAULTS if getattr(spec, name, 0) is None}


def completed(spec: Spec, chosen: Mapping[str, Any] = _DEFAULTS) -> Spec:
    """Returns a spec with chosen values of the fields that it leaves out."""
    missing = left_out(spec)
    return replace(spec, **{k: chosen[k] for k in missing}) if missing else spec


def check_spec(spec: Any) -> Any:
    """Returns a spec; raises TypeError for another object."""
    if not isinstance(spec, AnySpec):
        is_factor = isinstance(spec, int | float | str) and not isinstance(spec, bool)
        raise TypeError(
            "spec must be an EchoSpec, an AdaptiveSpec or a StochasticSpec, got "
            f"{spec!r:.80}. Use ej.EchoSpec(factor={repr(spec) if is_factor else 2})."
        )
    return spec
