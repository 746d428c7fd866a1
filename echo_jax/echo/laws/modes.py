"""The promises of the modes of an echo, computed a second time for the laws.

Numbers of uses are computed with fractions, and fetches with Python's integers. So a
mistake in `echo_jax.echo.schedule` or in a plan cannot confirm itself.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.keys import sequence
from echo_jax.echo.plans import make_plan, outputs_of
from echo_jax.echo.schedule import FactorByItem
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, EchoSpec, StochasticSpec


def bounds_of(spec: AnySpec, num_items: int) -> list[tuple[int, int]]:
    """Returns the least and the largest number of uses of every item."""
    if isinstance(spec, AdaptiveSpec):
        # After the upstream's end, the buffered items are used up.
        held, most = num_items - spec.buffer, spec.max_uses
        return [(spec.min_uses if k < held else most, most) for k in range(num_items)]
    if isinstance(spec, StochasticSpec):
        return [(1, len(batches_of(spec, num_items)))] * num_items
    factors = (_factor_of(spec.factor, index) for index in range(num_items))
    totals = itertools.accumulate(factors, initial=Fraction())
    uses = [math.floor(b) - math.floor(a) for a, b in itertools.pairwise(totals)]
    return list(zip(uses, uses, strict=True))


def _factor_of(factor: Any, index: int) -> Fraction:
    """Returns the factor of an item from the user's own value."""
    if isinstance(factor, FactorByItem):
        return Fraction(round(factor.function(index) * 10**6), 10**6)
    if isinstance(factor, Mapping):
        return _factor_of(factor[max(start for start in factor if start <= index)], 0)
    exact = Fraction(factor)
    return exact.limit_denominator(10**6) if isinstance(factor, float) else exact


def batches_of(spec: StochasticSpec, num_items: int) -> list[tuple[bool, int]]:
    """Returns (whether it is fetched, number of uses) of every stochastic batch."""
    batches, fetched = [], 0
    for number in itertools.count():
        probability = spec.fetch.probability(np.array([number]))[0]
        # A coin of 32 bits for each batch, from the seed's first purpose.
        coin = sequence(spec.seed, 0, number) >> 32
        is_fetched = number == 0 or coin < int(probability * 2**32)
        if is_fetched and fetched == num_items:
            break
        size = min(spec.batch_size, num_items - fetched if is_fetched else fetched)
        fetched += size if is_fetched else 0
        batches.append((is_fetched, size))
    return batches


def plan_run(
    spec: AnySpec, num_items: int, ready: Callable[[], bool] = lambda: False
) -> tuple[list[tuple[int, int]], DecisionLog | None]:
    """Returns the (fresh index, repeat) pairs and the log of a plan without a store."""
    # `ready` tells whether optional items (`need.may`) are there.
    plan = make_plan(spec)
    size = 1 if isinstance(spec, EchoSpec) else spec.batch_size
    pairs = []
    for _, uses in outputs_of(plan, num_items, size, ready):
        pairs += zip(uses.fresh_index[0].tolist(), uses.repeat[0].tolist(), strict=True)
    return pairs, getattr(plan, "log", None)
