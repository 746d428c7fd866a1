"""Lanes: the parts of a buffer that lies on several devices.

An item stays on one device, and every device finds its part of every batch in its own
slots, so that no draw communicates. Of G lanes, lane g takes the rows [g*u, (g+1)*u)
of every chunk of U rows, with u = U/G, and gives the rows [g*b, (g+1)*b) of every
batch of B, with b = B/G. It is an echo of its own stream of items, with the schedule
of all and a seed of its own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from echo_jax.echo.keys import use_seed
from echo_jax.echo.schedule import FactorByItem
from echo_jax.echo.spec import EchoSpec

__all__ = ["check_lanes", "global_index", "joined_state", "lane_spec", "split_state"]


def check_lanes(num_lanes: int, **sizes: int) -> None:
    """Refuses a number of lanes that does not divide some sizes.

    Raises:
      ValueError: With the size's name, its value and the fix.
    """
    if num_lanes < 1:
        raise ValueError(f"num_lanes={num_lanes} must be at least 1")
    for name, size in sizes.items():
        if size < 1 or size % num_lanes:
            raise ValueError(
                f"{name}={size} is not a multiple of num_lanes={num_lanes}; "
                f"use {math.ceil(max(size, 1) / num_lanes) * num_lanes}, or fewer lanes"
            )


def lane_spec(spec: EchoSpec, lane: int, num_lanes: int) -> EchoSpec:
    """Returns the echo of one lane: its part of batch and buffer, its own seed.

    Args:
      spec: The echo over all lanes.
      lane: Which lane, from 0.
      num_lanes: How many there are.

    Returns:
      ``spec`` itself if there is one lane.
    """
    if num_lanes == 1:
        return spec
    factor = spec.factor
    if isinstance(factor, FactorByItem):
        by_item = factor.function
        factor = replace(factor, function=lambda j: by_item(j * num_lanes))
    elif isinstance(factor, Mapping):
        factor = {start // num_lanes: factor[start] for start in sorted(factor)}
    return replace(
        spec,
        factor=factor,
        batch_size=spec.batch_size // num_lanes,
        buffer=max(1, spec.buffer // num_lanes),
        seed=int(use_seed(spec.seed, lane, 0)),
    )


def global_index(
    items: np.ndarray, lane_chunk: int, lanes: range | None = None, num_lanes: int = 0
) -> np.ndarray:
    """Returns fresh indices over all lanes, of items that lanes count by themselves.

    Args:
      items: One row for each lane, ``int64[G, n]``.
      lane_chunk: Rows of a chunk that a lane gets, u.
      lanes: Which lanes these are; all by default.
      num_lanes: How many there are in all.

    Returns:
      ``int64[G, n]``: row r of chunk c is c*U + r.

    Example:
      >>> global_index(np.array([[0, 1, 2], [0, 1, 2]]), lane_chunk=2).tolist()
      [[0, 1, 4], [2, 3, 6]]
    """
    lanes, num_lanes = lanes or range(len(items)), num_lanes or len(items)
    if num_lanes == 1:
        return items
    chunk, row = np.divmod(items, lane_chunk)
    lane = np.array(lanes)[:, None]
    return (chunk * num_lanes + lane) * lane_chunk + row


def split_state(state: Mapping[str, Any], num_parts: int) -> list[dict[str, Any]]:
    """Returns the states of draws over some of the lanes, of those over all of them.

    Args:
      state: From ``get_state`` of draws; see `echo_jax.echo.plans.draws.DrawPlan`.
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
    """Returns the state of draws over the lanes of several; see `split_state`.

    Args:
      states: Of as many lanes each, in their order.

    Raises:
      ValueError: They do not stand at the same chunk and draw.

    Example:
      >>> joined_state(split_state({"chunks": 3, "lanes": ["a", "b"]}, 2))
      {'chunks': 3, 'lanes': ['a', 'b']}
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
            "the states are not of the same draws of one echo; give those of all parts "
            "of one checkpoint"
        )
    return joined
