"""Lanes: the parts of a buffer that is split over several devices.

An item stays on one device, and every device finds its part of every batch in its own
slots, so a batch is read without communication. There are G lanes, host batches of U
rows and training batches of B rows, with u = U/G and b = B/G. Lane g takes the rows
[g*u, (g+1)*u) of every host batch, and gives the rows [g*b, (g+1)*b) of every training
batch. A lane is an echo of its own stream of items, with the common schedule and a seed
of its own.
"""

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from echo_jax.echo.keys import seed_for_use
from echo_jax.echo.orders import ORDERS
from echo_jax.echo.schedule import FactorByItem
from echo_jax.echo.spec import AnySpec, EchoSpec, Spec, StochasticSpec, completed


@dataclass(frozen=True)
class Lanes:
    """The number of lanes, and the size of the host batches that come in."""

    host_batch: int = 1  # fresh items that come together over all lanes, U
    count: int = 1  # lanes, G; divides ``host_batch``
    own: Sequence[int] = field(default=range(0))  # decided here; all by default
    first: int = 0  # fresh items over all lanes in earlier passes over the upstream

    def __post_init__(self):
        if self.count < 1:
            raise ValueError(f"num_lanes={self.count} must be at least 1")
        self.check(host_batch=self.host_batch)
        if not self.own:
            object.__setattr__(self, "own", range(self.count))

    @property
    def rows(self) -> int:
        """Fresh items that come together in a lane, u."""
        return self.host_batch // self.count

    def check(self, **sizes: int) -> None:
        """Raises ValueError unless the number of lanes divides every size."""
        for name, size in sizes.items():
            if size < 1 or size % self.count:
                fits = math.ceil(max(size, 1) / self.count) * self.count
                raise ValueError(
                    f"{name}={size} is not a multiple of num_lanes={self.count}; "
                    f"use {fits}, or fewer lanes"
                )

    def global_index(self, items: np.ndarray) -> np.ndarray:
        """Returns indices over all lanes of items counted by lane, ``int64[G, n]``."""
        # Row r of host batch c is c*U + r.
        if self.count == 1:
            return items + self.first if self.first else items
        batch, row = np.divmod(items, self.rows)
        lane = np.array(self.own)[:, None]
        return (batch * self.count + lane) * self.rows + row + self.first


def lane_spec(spec: Spec, lane: int, num_lanes: int) -> Spec:
    """Returns the echo of one lane: its part of batch and buffer, and its own seed."""
    # A stochastic echo keeps its seed, so that all lanes fetch at the same batches.
    spec = completed(spec)
    if num_lanes == 1:
        return spec
    changes: dict[str, Any] = {
        "batch_size": spec.batch_size // num_lanes,
        "buffer": max(1, spec.buffer // num_lanes),
    }
    if not isinstance(spec, StochasticSpec):
        changes["seed"] = int(seed_for_use(spec.seed, lane, 0))
    if isinstance(spec, EchoSpec):
        # Item j of a lane has the factor of item j * ``num_lanes`` of all.
        factor = spec.factor
        if isinstance(factor, FactorByItem):
            by_item = factor.function
            factor = replace(factor, function=lambda j: by_item(j * num_lanes))
        elif isinstance(factor, Mapping):
            factor = {start // num_lanes: factor[start] for start in sorted(factor)}
        changes["factor"] = factor
    return replace(spec, **changes)


def epoch_spec(spec: Spec, number: int, first: int) -> Spec:
    """Returns the echo of a later pass over the upstream, from fresh item ``first``."""
    if not number:
        return spec
    changes: dict[str, Any] = {"seed": int(seed_for_use(spec.seed, 0, number)) >> 1}
    if isinstance(spec, EchoSpec):
        changes["factor"] = _factor_from(spec.factor, first)
    return replace(spec, **changes)


def _factor_from(factor: Any, first: int) -> Any:
    """Returns the factor whose item 0 is item ``first`` of another one."""
    if isinstance(factor, FactorByItem):
        by_item = factor.function
        return replace(factor, function=lambda k: by_item(k + first))
    if isinstance(factor, Mapping):
        starts = sorted(factor)
        begun = [start for start in starts if start <= first]
        later = {start - first: factor[start] for start in starts[len(begun) :]}
        return {0: factor[begun[-1]], **later}
    return factor


def lanes_are_alike(spec: AnySpec) -> bool:
    """Returns whether each lane takes fresh items at batches that the spec fixes."""
    if isinstance(spec, EchoSpec):
        return not ORDERS[spec.order].drifts
    return isinstance(spec, StochasticSpec)


def split_state(state: Mapping[str, Any], num_parts: int) -> list[dict[str, Any]]:
    """Splits the state of a plan of all lanes into states of ``num_parts`` plans."""

    def part(key: str, value: Any, number: int) -> Any:
        if key == "lanes":
            each = len(value) // num_parts
            return value[number * each : (number + 1) * each]
        return value // num_parts if key == "repeats" else value

    return [{k: part(k, v, n) for k, v in state.items()} for n in range(num_parts)]


def joined_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the state of a plan of all lanes from its parts' states, in order."""
    joined = dict(states[0])
    for key in joined.keys() & {"lanes", "repeats"}:
        joined[key] = functools.reduce(operator.add, [each[key] for each in states])
    if split_state(joined, len(states)) != [*states]:
        raise ValueError(
            "the states are not of the same place of one echo. Give the states of all "
            "parts from one checkpoint."
        )
    return joined
