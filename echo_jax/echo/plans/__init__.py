"""The plans of an echo: they decide which items are taken, and when each is used."""

from echo_jax.echo.plans.adaptive import AdaptivePlan
from echo_jax.echo.plans.base import Need, Plan, Uses, outputs_of
from echo_jax.echo.plans.fixed import FixedPlan
from echo_jax.echo.plans.lanes import Lanes, joined_state, lane_spec, split_state
from echo_jax.echo.plans.stochastic import StochasticPlan
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, StochasticSpec, check_spec

__all__ = [
    "Lanes",
    "Need",
    "Uses",
    "joined_state",
    "lane_spec",
    "make_plan",
    "outputs_of",
    "split_state",
]


def make_plan(
    spec: AnySpec,
    *,
    lanes: Lanes | None = None,
    max_batches: int = 1,
    options: tuple[object, ...] = (),
) -> Plan:
    """Returns the plan of a spec of any mode."""
    check_spec(spec)
    if isinstance(spec, AdaptiveSpec):
        return AdaptivePlan(spec, lanes=lanes, options=options)
    if isinstance(spec, StochasticSpec):
        return StochasticPlan(
            spec, lanes=lanes, max_batches=max_batches, options=options
        )
    return FixedPlan(spec, lanes=lanes, max_batches=max_batches, options=options)
