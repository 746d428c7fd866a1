"""Fields that have a meaning only if another field, their switch, has some value."""

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from echo_jax.config.group import field_of
from echo_jax.config.optim import OWN_OPTIMIZERS
from echo_jax.config.specs import CHANGING, MEETING
from echo_jax.studies.fields import flat_fields

# Fields, their switch, and the values of the switch with which they have a meaning.
_NEEDED = (
    ("optim.boundaries", "optim.schedule", ("piecewise", "slow_start")),
    ("echo.replay", "echo.mode", ("adaptive",)),
    ("echo.fetch.quantity echo.fetch.schedule", "echo.mode", ("stochastic",)),
    (
        "echo.fetch.start echo.fetch.end echo.fetch.updates",
        "echo.mode",
        ("stochastic",),
    ),
    ("echo.lanes echo.buffer_bytes", "echo.buffer_on", ("device",)),
    ("precision.init", "precision.loss_scale", ("static", "dynamic")),
    ("precision.growth precision.min_scale", "precision.loss_scale", ("dynamic",)),
    ("local.sync_every", "local.sync_schedule", ("every",)),
    ("local.sync_p", "local.sync_schedule", ("bernoulli", *CHANGING)),
    ("local.sync_p_end", "local.sync_schedule", CHANGING),
    ("local.outer local.start_after", "local.sync_schedule", MEETING),
    ("local.outer_lr local.outer_momentum", "local.outer", ("nesterov",)),
)

_RISING = ("onecycle", "cyclic")
_ARGUMENTS = {"optim.name": "optim.args", "optim.schedule": "optim.schedule_args"}


class Idle(NamedTuple):
    """A field that is set without effect, because of another field, its switch."""

    field: str
    switch: str
    rule: str  # The reason why it has no effect.
    usual: Any  # The value that leaves it out.


# The caller may change the config between two fields.
def idle_fields(config: Any, defaults: Any) -> Iterator[Idle]:
    """Yields the fields that are set without effect, switches first."""
    for field, switch, applies, rule in _conditions(config):
        usual = field_of(defaults, field)
        if not applies and field_of(config, field) != usual:
            yield Idle(field, switch, rule, usual)
    optim = config.optim
    if optim.schedule in _RISING and not optim.start_fraction > 0:
        rule = f"must be above 0 with {optim.schedule}, which begins there"
        yield Idle("optim.start_fraction", "optim.schedule", rule, 0.04)


# A typed field without effect stays, so that the check refuses it. Each reset field is
# printed on standard error. `before` is the config without the typed fields.
def leave_out(config: Any, defaults: Any, typed: Collection[str], before: Any) -> None:
    """Resets fields of the config file that have no effect with the typed fields."""
    prefix = "base." if "arms" in config and "base" in config else ""
    if prefix:
        config, before = config.base, before.base
    typed = {name.removeprefix(prefix) for name in typed if name.startswith(prefix)}
    if missing_field(config, defaults):
        return
    for switch, args in _ARGUMENTS.items():
        was = field_of(before, switch)
        if args not in typed and field_of(config, switch) != was:
            _reset(config, Idle(args, switch, f"belongs to {was}", "{}"), prefix)
    switched = set(typed)
    for idle in idle_fields(config, defaults):
        if idle.switch in switched and idle.field not in typed:
            _reset(config, idle, prefix)
            switched.add(idle.field)


def missing_field(config: Any, defaults: Mapping[str, Any]) -> str:
    """Returns a field that a config made from the default one would have, or ""."""
    has = {*config, *flat_fields(config.to_dict())}
    needed = [*defaults, *flat_fields(defaults)]
    return next((name for name in needed if name not in has), "")


def _reset(config: Any, idle: Idle, prefix: str) -> None:
    """Resets a field and prints it."""
    value = field_of(config, idle.field)
    if value == idle.usual:
        return
    config.update_from_flattened_dict({idle.field: idle.usual})
    print(
        f"config.{prefix}{idle.field}={value!r} of the config file {idle.rule}; "
        f"{idle.usual!r} is used instead",
        file=sys.stderr,
    )


def _conditions(config: Any) -> Iterator[tuple[str, str, bool, str]]:
    """Yields a field, its switch, whether it has a meaning, and the reason if not."""
    echo, name, schedule = config.echo, config.optim.name, config.optim.schedule
    is_own = not name.startswith("optax.")
    rule = f"belongs to {', '.join(OWN_OPTIMIZERS)}; {name} has it in config.optim.args"
    yield "optim.weight_decay", "optim.name", is_own, rule
    rule = f"belongs to optimizers of optax; {name} has fields of its own"
    yield "optim.args", "optim.name", not is_own, rule
    rule = f"has no meaning with {name}, which sets the length of every step itself"
    yield "optim.clip_norm", "optim.name", name not in ("lars", "lamb"), rule
    rule = f"belongs to schedules of optax; {schedule} has fields of its own"
    is_of_optax = schedule.startswith("optax.")
    yield "optim.schedule_args", "optim.schedule", is_of_optax, rule
    rule = f"has no meaning with {schedule}, which rises by itself"
    yield "optim.warmup_updates", "optim.schedule", schedule not in _RISING, rule

    is_fixed, is_adaptive = echo.mode == "fixed", echo.mode == "adaptive"
    bound = "echo.max_uses" if is_adaptive else "echo.fetch"
    rule = f"belongs to mode fixed; mode {echo.mode} goes by config.{bound}"
    yield "echo.factor", "echo.mode", is_fixed, rule
    rule = f"belongs to mode fixed; mode {echo.mode} has an order of its own"
    yield "echo.order", "echo.mode", is_fixed, rule
    rule = "belongs to mode adaptive, where no pattern decides"
    decides = is_adaptive and not echo.replay.startswith("pattern:")
    yield "echo.min_uses", "echo.mode", decides, rule
    rule = "would decide adaptive draws too far ahead"
    yield "dispatch.steps", "echo.mode", not is_adaptive, rule
    rule = "has no place for a meeting: local updates are dispatched one by one"
    is_one_model = config.local.sync_schedule == "none"
    yield "dispatch.steps", "local.sync_schedule", is_one_model, rule
    yield "stop_at_target", "target", bool(config.target), "needs a target"

    for fields, switch, values in _NEEDED:
        rule = f"needs --config.{switch}={' or '.join(values)}"
        for field in fields.split():
            yield field, switch, field_of(config, switch) in values, rule
