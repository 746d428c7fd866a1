"""The plans of an echo: which fresh items are taken, and who is used when."""

from typing import Any

from echo_jax.echo.plans.adaptive import AdaptivePlan
from echo_jax.echo.plans.base import Plan
from echo_jax.echo.plans.fixed import FixedPlan
from echo_jax.echo.plans.lanes import Lanes
from echo_jax.echo.plans.stochastic import StochasticPlan
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, StochasticSpec, check_spec

__all__ = ["make_plan"]


def make_plan(
    spec: AnySpec,
    *,
    lanes: Lanes | None = None,
    max_batches: int = 1,
    room: int = 0,
    welcome: int = 0,
    options: tuple[object, ...] = (),
) -> Plan:
    """Returns the plan of a spec, of whichever mode.

    Args:
      spec: The echo, over all lanes.
      lanes: How fresh items come in; by default as the mode needs them, in one lane.
      max_batches: The most batches that are decided at once.
      room: Items of a fixed echo without lanes that may have slots before they are
        needed, so that batches are decided together.
      welcome: As many of them are read where they are ready.
      options: What else shapes the sequence, so that a state is refused where it
        differs.

    Raises:
      TypeError: If it is not a spec.
      ValueError: If the spec cannot be carried out.

    Example:
      >>> make_plan(AdaptiveSpec(buffer=8, batch_size=2)).need(2)
      Need(must=2, may=0)
    """
    check_spec(spec)
    shape: dict[str, Any] = {"lanes": lanes, "options": options}
    if isinstance(spec, AdaptiveSpec):
        return AdaptivePlan(spec, **shape)
    if isinstance(spec, StochasticSpec):
        return StochasticPlan(spec, max_batches=max_batches, **shape)
    return FixedPlan(spec, max_batches=max_batches, room=room, welcome=welcome, **shape)
