"""Fields that need some value of another field, their switch."""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from echo_jax.config.optim import OWN_OPTIMIZERS, OWN_SCHEDULES
from echo_jax.config.specs import CHANGING
from echo_jax.studies.fields import flat_fields

_Rows = Iterable[tuple[str, str, str, Collection[Any]]]

# Fields, and the values of their switch with which they have an effect.
_USED: _Rows = (
    ("optim.args", "optim.name", "!=", OWN_OPTIMIZERS),
    ("optim.weight_decay", "optim.name", "=", OWN_OPTIMIZERS),
    ("optim.clip_norm", "optim.name", "!=", ("lars", "lamb")),
    ("optim.schedule_args", "optim.schedule", "!=", OWN_SCHEDULES),
    ("optim.warmup_updates", "optim.schedule", "!=", ("onecycle", "cyclic")),
    ("optim.boundaries", "optim.schedule", "=", ("piecewise", "slow_start")),
    ("echo.factor echo.order", "echo.mode", "=", ("fixed",)),
    ("echo.replay echo.min_uses", "echo.mode", "=", ("adaptive",)),
    ("echo.fetch.quantity echo.fetch.schedule", "echo.mode", "=", ("stochastic",)),
    ("echo.fetch.start echo.fetch.end", "echo.mode", "=", ("stochastic",)),
    ("echo.fetch.updates", "echo.mode", "=", ("stochastic",)),
    ("echo.lanes echo.buffer_bytes", "echo.buffer_on", "=", ("device",)),
    ("precision.init", "precision.loss_scale", "=", ("static", "dynamic")),
    ("precision.growth precision.min_scale", "precision.loss_scale", "=", ("dynamic",)),
    ("local.sync_every", "local.sync_schedule", "=", ("every",)),
    ("local.sync_p", "local.sync_schedule", "=", ("bernoulli", *CHANGING)),
    ("local.sync_p_end", "local.sync_schedule", "=", CHANGING),
    ("local.outer local.start_after", "local.sync_schedule", "!=", ("none",)),
    ("local.outer_lr local.outer_momentum", "local.outer", "=", ("nesterov",)),
    ("dispatch.steps", "echo.mode", "!=", ("adaptive",)),
    ("dispatch.steps", "local.sync_schedule", "=", ("none",)),
    ("stop_at_target", "target", "!=", (0.0,)),
)
# Fields that are refused with other values of their switch. They are never reset.
_POSSIBLE: _Rows = (
    ("mesh.fsdp batch.boundaries", "local.sync_schedule", "=", ("none",)),
    ("local.staleness probe_repeats", "local.sync_schedule", "=", ("none",)),
    ("batch.accumulation_steps", "local.sync_schedule", "=", ("none",)),
    ("precision.loss_scale precision.reduce", "local.sync_schedule", "=", ("none",)),
    ("batch.accumulation_steps batch.statistics", "mesh.fsdp", "=", (1,)),
    ("precision.reduce", "mesh.fsdp", "=", (1,)),
    ("batch.boundaries", "optim.scale", "!=", ("sqrt",)),
    ("local.sync_schedule", "batch.norm", "!=", ("last",)),
    ("echo.buffer_on", "echo.stage", "=", ("decode", "augment")),
    ("echo.mode dispatch.steps probe_repeats", "batch.boundaries", "=", ((),)),
)
_HINTS = {
    "optim.weight_decay": "; an optimizer of optax has it in config.optim.args",
    "echo.factor": "; the others go by config.echo.max_uses or config.echo.fetch",
}


Fields = Mapping[str, Any]
"""Values by the dotted names of their fields."""


Misfit = tuple[str, str, str, Any]
"""A field, its switch, the rule that it breaks, and the value that leaves it out."""


# The caller may change the fields between two of them.
def unused_fields(fields: Fields, defaults: Fields) -> Iterator[Misfit]:
    """Yields the fields that are set without effect, switches first."""
    yield from _misfits(fields, defaults, _USED)
    schedule, start = "optim.schedule", "optim.start_fraction"
    if fields[schedule] in ("onecycle", "cyclic") and not fields[start]:
        rule = f"must be above 0 with {fields[schedule]}, which begins there"
        yield start, schedule, rule, 0.04


def misfits(fields: Fields, defaults: Fields) -> Iterator[Misfit]:
    """Yields the fields that do not go with the value of another one."""
    yield from unused_fields(fields, defaults)
    yield from _misfits(fields, defaults, _POSSIBLE)


def _misfits(fields: Fields, defaults: Fields, rows: _Rows) -> Iterator[Misfit]:
    for names, switch, relation, values in rows:
        for name in names.split():
            is_right = (fields[switch] in values) == (relation == "=")
            if not is_right and fields[name] != defaults[name]:
                known = " or ".join(map(str, values))
                rule = f"needs config.{switch}{relation}{known}{_HINTS.get(name, '')}"
                yield name, switch, rule, defaults[name]


# A typed field without effect stays, so that the check refuses it. Each reset field is
# printed on standard error.
def leave_out(config: Any, defaults: Fields, typed: Collection[str]) -> None:
    """Resets fields of the config file that have no effect with the typed fields."""
    prefix = "base." if "arms" in config and "base" in config else ""
    config = config.base if prefix else config
    typed = {name.removeprefix(prefix) for name in typed if name.startswith(prefix)}
    switched, fields = set(typed), {**defaults, **flat_fields(config.to_dict())}
    for field, switch, rule, usual in unused_fields(fields, defaults):
        if switch in switched and field not in typed:
            print(
                f"config.{prefix}{field}={fields[field]!r} of the config file {rule}; "
                f"{usual!r} is used instead",
                file=sys.stderr,
            )
            config.update_from_flattened_dict({field: usual})
            fields[field] = usual
            switched.add(field)
