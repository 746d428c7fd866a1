"""The local updates of a training config, and the refused combinations."""

from collections.abc import Iterator
from typing import Any

from echo_jax.config import Config
from echo_jax.config.applies import field_of
from echo_jax.echo.schedule import FetchSchedule


def meeting_schedule(config: Config) -> FetchSchedule:
    """Returns the probability schedule by which replicas synchronise."""
    local = config.local
    if local.schedule == "bernoulli":
        return FetchSchedule("p", "constant", local.p, local.p)
    return FetchSchedule("p", local.schedule, local.p, local.p_end, config.updates)


def broken_rules(config: Config) -> Iterator[tuple[str, str, Any]]:
    """Yields each field that breaks a rule of local updates, the rule, and a fix."""
    local = config.local
    for name in ("p", "p_end"):
        if not 0 < local[name] <= 1:
            yield f"local.{name}", "must be a probability, in (0, 1]", 1.0
    if local.schedule == "none":
        return
    if local.schedule == "fetch" and config.echo.mode != "stochastic":
        rule = "meets where fresh data is loaded; it needs config.echo.mode=stochastic"
        yield "local.schedule", rule, "every"
    shares = "delays gradients that devices share, and replicas share none"
    of_one = "is of one model, and the mean of replicas has seen no batch"
    kind = "is the type of gradients that devices share, and replicas share none"
    for field, usual, rule in (
        ("local.staleness", 0, shares),
        ("mesh.fsdp", 1, "needs one copy of the parameters, not replicas"),
        ("batch.boundaries", (), "is for one model, not replicas"),
        ("batch.micro", 1, "is for gradients that devices share, not replicas"),
        ("precision.loss_scale", "none", "is of one model, not replicas"),
        ("precision.reduce", "auto", kind),
    ):
        if field_of(config, field) != usual:
            yield field, rule, usual
    if config.batch.norm == "last":
        yield "batch.norm", of_one, "recompute"
