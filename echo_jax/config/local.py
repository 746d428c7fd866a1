"""The local updates of a training config, and the refused combinations."""

from collections.abc import Iterator
from typing import Any

from echo_jax.config import Config
from echo_jax.echo.load_schedule import LoadSchedule

__all__ = ["broken_rules", "meeting_schedule"]


def meeting_schedule(config: Config) -> LoadSchedule:
    """Returns the probability schedule by which replicas synchronise."""
    local = config.local
    if local.schedule == "bernoulli":
        return LoadSchedule("p", "constant", local.p, local.p)
    return LoadSchedule("p", local.schedule, local.p, local.p_end, config.updates)


def broken_rules(config: Config) -> Iterator[tuple[str, str, Any]]:
    """Yields each field that breaks a rule of local updates, the rule, and a fix."""
    local = config.local
    for name in ("p", "p_end"):
        if not 0 < local[name] <= 1:
            yield f"local.{name}", "must be a probability, in (0, 1]", 1.0
    if local.schedule == "none":
        return
    if local.schedule == "load" and config.echo.mode != "stochastic":
        rule = "meets where fresh data is loaded; it needs config.echo.mode=stochastic"
        yield "local.schedule", rule, "every"
    if local.staleness:
        rule = "delays gradients that devices share, and replicas share none"
        yield "local.staleness", rule, 0
    if config.mesh.fsdp != 1:
        yield "mesh.fsdp", "needs one copy of the parameters, not replicas", 1
    if config.batch.boundaries:
        yield "batch.boundaries", "is for one model, not replicas", ()
    if config.batch.micro != 1:
        yield "batch.micro", "is for gradients that devices share, not replicas", 1
    if config.batch.norm == "last":
        rule = "is of one model, and the mean of replicas has seen no batch"
        yield "batch.norm", rule, "recompute"
    if config.precision.loss_scale != "none":
        yield "precision.loss_scale", "is of one model, not replicas", "none"
    if config.precision.reduce != "auto":
        rule = "is the type of gradients that devices share, and replicas share none"
        yield "precision.reduce", rule, "auto"
