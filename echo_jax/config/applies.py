"""Fields that have a meaning only if another field, their switch, has some value."""

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from echo_jax.config.group import field_of
from echo_jax.config.local import CHANGING, MEETING
from echo_jax.config.optim import OWN_OPTIMIZERS

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
    ("echo.lanes echo.buffer_bytes", "echo.where", ("device",)),
    ("precision.init", "precision.loss_scale", ("static", "dynamic")),
    ("precision.growth precision.min_scale", "precision.loss_scale", ("dynamic",)),
    ("local.every", "local.schedule", ("every",)),
    ("local.p", "local.schedule", ("bernoulli", *CHANGING)),
    ("local.p_end", "local.schedule", CHANGING),
    ("local.outer local.start_after", "local.schedule", MEETING),
    ("local.outer_lr local.outer_momentum", "local.outer", ("nesterov",)),
)


class Idle(NamedTuple):
    """A field that is set without effect, because of another field, its switch."""

    field: str
    switch: str
    rule: str  # The reason why it has no effect.
    usual: Any  # The value that leaves it out.


# The caller may change the config between two fields.
def idle_fields(config: Any, defaults: Any) -> Iterator[Idle]:
    """Yields the fields that are set without effect, switches first."""
    for field, switch, applies, rule, *usual in _conditions(config):
        neutral = usual[0] if usual else field_of(defaults, field)
        if not applies and field_of(config, field) != neutral:
            yield Idle(field, switch, rule, neutral)


# A typed field without effect stays, so that the check refuses it. Each reset field is
# printed on standard error. `before` is the config without the typed fields.
def leave_out(config: Any, defaults: Any, typed: Collection[str], before: Any) -> None:
    """Resets fields of the config file that have no effect with the typed fields."""
    prefix = "base." if "arms" in config and "base" in config else ""
    if prefix:
        config, before = config.base, before.base
    switched = {name.removeprefix(prefix) for name in typed if name.startswith(prefix)}
    typed = frozenset(switched)
    if missing_field(config, defaults):
        return
    for name in ("name", "schedule"):
        args = "optim.args" if name == "name" else "optim.schedule_args"
        was = before.optim[name]
        if args not in typed and config.optim[name] != was:
            _say(config, Idle(args, "", f"belongs to {was}", "{}"), prefix)
    for idle in idle_fields(config, defaults):
        if idle.switch in switched and idle.field not in typed:
            _say(config, idle, prefix)
            switched.add(idle.field)


def missing_field(config: Any, defaults: Any, prefix: str = "") -> str:
    """Returns a field that a config made from the default one would have, or ""."""
    for name, value in defaults.items():
        if name not in config:
            return prefix + name
        if isinstance(value, Mapping) and (
            missing := missing_field(config[name], value, f"{prefix}{name}.")
        ):
            return missing
    return ""


def _say(config: Any, idle: Idle, prefix: str) -> None:
    """Resets a field and prints it."""
    *groups, name = idle.field.split(".")
    value = field_of(config, idle.field)
    if value == idle.usual:
        return
    (field_of(config, ".".join(groups)) if groups else config)[name] = idle.usual
    print(
        f"config.{prefix}{idle.field}={value!r} of the config file {idle.rule}; "
        f"{idle.usual!r} is used instead",
        file=sys.stderr,
    )


def _conditions(config: Any) -> Iterator[tuple[Any, ...]]:
    """Yields field, switch, whether it applies, why not, and optionally its fix."""
    optim, echo, dispatch = config.optim, config.echo, config.dispatch

    name, is_own = optim.name, not optim.name.startswith("optax.")
    rule = f"belongs to {', '.join(OWN_OPTIMIZERS)}; {name} has it in config.optim.args"
    yield "optim.weight_decay", "optim.name", is_own, rule, 0.0
    rule = f"belongs to optimizers of optax; {name} has fields of its own"
    # An empty object, with or without spaces, means no arguments.
    has_args = bool(optim.args.strip("{} "))
    yield "optim.args", "optim.name", not (is_own and has_args), rule
    rule = f"has no meaning with {name}, which sets the length of every step itself"
    yield "optim.clip_norm", "optim.name", name not in ("lars", "lamb"), rule, 0.0

    name, is_own = optim.schedule, not optim.schedule.startswith("optax.")
    rule = f"belongs to schedules of optax; {name} has fields of its own"
    has_args = bool(optim.schedule_args.strip("{} "))
    yield "optim.schedule_args", "optim.schedule", not (is_own and has_args), rule
    rises = name in ("onecycle", "cyclic")
    rule = f"has no meaning with {name}, which rises by itself"
    yield "optim.warmup_updates", "optim.schedule", not rises, rule
    begins = not rises or optim.start_fraction > 0
    rule = f"must be above 0 with {name}, which begins there"
    yield "optim.start_fraction", "optim.schedule", begins, rule, 0.04

    is_fixed = echo.mode == "fixed"
    bound = "echo.max_uses" if echo.mode == "adaptive" else "echo.fetch"
    rule = f"belongs to mode fixed; mode {echo.mode} goes by config.{bound}"
    yield "echo.factor", "echo.mode", is_fixed, rule, 1.0
    rule = f"belongs to mode fixed; mode {echo.mode} has an order of its own"
    yield "echo.order", "echo.mode", is_fixed, rule, "consecutive"
    decides = echo.mode == "adaptive" and not echo.replay.startswith("pattern:")
    rule = "belongs to mode adaptive, where no pattern decides"
    yield "echo.min_uses", "echo.mode", decides, rule, 1

    is_one = dispatch.steps == 1
    rule = "would decide adaptive draws too far ahead"
    is_open = is_one or echo.mode != "adaptive"
    yield "dispatch.steps", "echo.mode", is_open, rule, 1
    rule = "has no place for a meeting: local updates are dispatched one by one"
    is_open = is_one or config.local.schedule == "none"
    yield "dispatch.steps", "local.schedule", is_open, rule, 1

    yield "stop_at_target", "target", bool(config.target), "needs a target", False

    for fields, switch, values in _NEEDED:
        rule = f"needs --config.{switch}={' or '.join(values)}"
        for field in fields.split():
            yield field, switch, field_of(config, switch) in values, rule
