"""Lanes: the parts of a buffer that lies on several devices.

An item stays on one device, and every device finds its part of every batch in its own
slots, so that a batch is read without communication. Of G lanes, lane g takes the rows
[g*u, (g+1)*u) of every host batch of U rows, with u = U/G, and gives the rows
[g*b, (g+1)*b) of every training batch of B, with b = B/G. It is an echo of its own
stream of items, with the schedule of all and a seed of its own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from echo_jax.echo.keys import use_seed
from echo_jax.echo.schedule import FactorByItem
from echo_jax.echo.spec import AnySpec, EchoSpec, StochasticSpec

__all__ = ["Lanes", "Spec", "joined_state", "lane_spec", "split_state"]


@dataclass(frozen=True)
class Lanes:
    """How fresh items come in.

    Attributes:
      host_batch: Fresh items that come together, U, over all lanes.
      count: How many lanes there are, G; divides them.
      own: Those that are decided here, where others are somewhere else.

    Raises:
      ValueError: The lanes do not divide the items.

    Example:
      >>> lanes = Lanes(host_batch=4, count=2)
      >>> lanes.rows, lanes.global_index(np.array([[0, 1, 2], [0, 1, 2]])).tolist()
      (2, [[0, 1, 4], [2, 3, 6]])
    """

    host_batch: int = 1
    count: int = 1
    own: range = field(default=range(0))

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
        """Refuses a number of lanes that does not divide some sizes.

        Raises:
          ValueError: With the size's name, its value and the fix.
        """
        for name, size in sizes.items():
            if size < 1 or size % self.count:
                fits = math.ceil(max(size, 1) / self.count) * self.count
                raise ValueError(
                    f"{name}={size} is not a multiple of num_lanes={self.count}; "
                    f"use {fits}, or fewer lanes"
                )

    def global_index(self, items: np.ndarray) -> np.ndarray:
        """Returns fresh indices over all lanes, of items that lanes count themselves.

        Args:
          items: One row for each of the own lanes, ``int64[G, n]``.

        Returns:
          ``int64[G, n]``: row r of host batch c is c*U + r.
        """
        if self.count == 1:
            return items
        batch, row = np.divmod(items, self.rows)
        lane = np.array(self.own)[:, None]
        return (batch * self.count + lane) * self.rows + row


Spec = TypeVar("Spec", bound=AnySpec)


def lane_spec(spec: Spec, lane: int, num_lanes: int) -> Spec:
    """Returns the echo of one lane: its part of batch and buffer, its own seed.

    A stochastic one keeps its seed, by which all lanes load at the same batches.

    Args:
      spec: The echo over all lanes.
      lane: Which lane, from 0.
      num_lanes: How many there are.

    Returns:
      ``spec`` itself if there is one lane.
    """
    if num_lanes == 1:
        return spec
    changes: dict[str, Any] = {
        "batch_size": spec.batch_size // num_lanes,
        "buffer": max(1, spec.buffer // num_lanes),
    }
    if not isinstance(spec, StochasticSpec):
        changes["seed"] = int(use_seed(spec.seed, lane, 0))
    if isinstance(spec, EchoSpec):
        changes["factor"] = _lane_factor(spec.factor, num_lanes)
    return replace(spec, **changes)


def _lane_factor(factor: Any, num_lanes: int) -> Any:
    """Returns the factor of a lane's item j, which is one of ``num_lanes`` of all."""
    if isinstance(factor, FactorByItem):
        by_item = factor.function
        return replace(factor, function=lambda j: by_item(j * num_lanes))
    if isinstance(factor, Mapping):
        return {start // num_lanes: factor[start] for start in sorted(factor)}
    return factor


def split_state(state: Mapping[str, Any], num_parts: int) -> list[dict[str, Any]]:
    """Returns the states of plans of some of the lanes, from that of all of them.

    Args:
      state: From ``get_state`` of a plan; see `echo_jax.echo.plans.base.Plan`.
      num_parts: Into how many parts of as many lanes.
    """
    parts = [dict(state) for _ in range(num_parts)]
    for number, part in enumerate(parts):
        if "lanes" in state:
            each = len(state["lanes"]) // num_parts
            part["lanes"] = state["lanes"][number * each : (number + 1) * each]
        if "repeats" in state:
            part["repeats"] = state["repeats"] // num_parts
    return parts


def joined_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the state of a plan of the lanes of several; see `split_state`.

    Args:
      states: Of as many lanes each, in their order.

    Raises:
      ValueError: They do not stand at the same fresh item and batch.

    Example:
      >>> joined_state(split_state({"lanes": ["a", "b"], "written": 3}, 2))
      {'lanes': ['a', 'b'], 'written': 3}
    """
    joined = dict(states[0])
    if "lanes" in joined:
        joined["lanes"] = [lane for state in states for lane in state["lanes"]]
    if "repeats" in joined:
        joined["repeats"] = sum(state["repeats"] for state in states)
    summed = {"lanes", "repeats"}
    fixed = [{k: v for k, v in s.items() if k not in summed} for s in states]
    if any(each != fixed[0] for each in fixed):
        raise ValueError(
            "the states are not of the same place of one echo; give those of all parts "
            "of one checkpoint"
        )
    return joined
