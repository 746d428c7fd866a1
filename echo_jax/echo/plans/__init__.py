"""The plans of an echo: they decide which items are taken, and when each is used."""

from typing import Any

from echo_jax.echo.plans.adaptive import AdaptivePlan
from echo_jax.echo.plans.base import Plan
from echo_jax.echo.plans.fixed import FixedPlan
from echo_jax.echo.plans.stochastic import StochasticPlan
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, StochasticSpec, check_spec


def make_plan(spec: AnySpec, **options: Any) -> Plan:
    """Returns the plan of a spec of any mode, with the options of `FixedPlan`."""
    check_spec(spec)
    if isinstance(spec, AdaptiveSpec):
        options.pop("max_batches", None)  # It decides one batch at a time.
        return AdaptivePlan(spec, **options)
    if isinstance(spec, StochasticSpec):
        return StochasticPlan(spec, **options)
    return FixedPlan(spec, **options)
