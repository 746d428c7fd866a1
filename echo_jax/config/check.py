"""Checks a training config: the range of every shared field, and combinations.

It checks only the shared fields and ignores the devices. Machine-dependent values are
checked when the mesh is made, and ``model`` by its workload. The dataclasses of an echo
and of a pipeline check their own fields.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

from echo_jax.config import Config, default_config
from echo_jax.config.applies import (
    MEETING,
    OWN_OPTIMIZERS,
    field_of,
    idle_fields,
    missing_field,
)
from echo_jax.config.batch import BatchGrowth
from echo_jax.config.echo import echo_spec, fetch_schedule, pattern_of
from echo_jax.config.local import broken_rules
from echo_jax.config.optimizer import (
    OWN_SCHEDULES,
    SLOW_START_ENDS,
    optax_factory,
    optax_schedule,
)
from echo_jax.data.pipeline.spec import PipelineSpec

_LEASTS = (
    (
        0,
        "seed probe_repeats checkpoint_every echo.buffer_bytes echo.lanes "
        "optim.warmup_updates optim.decay_updates data.eval_examples data.shards "
        "distributed.process_id profile.updates profile.start local.start_after "
        "local.staleness",
    ),
    (
        0.0,
        "optim.start_fraction optim.end_fraction optim.peak_momentum optim.eps "
        "optim.boundary_scale optim.momentum optim.b1 optim.b2 optim.weight_decay "
        "optim.clip_norm data.timeout_s local.outer_lr local.outer_momentum",
    ),
    (
        1,
        "updates batch_size log_every eval_every keep_checkpoints echo.max_uses "
        "dispatch.steps optim.reference_batch optim.cooldown_updates "
        "optim.transition_updates precision.growth distributed.num_processes "
        "mesh.fsdp batch.micro batch.norm_batches local.every",
    ),
    (2, "optim.cycle_updates"),
)
_AT_LEAST = {field: least for least, fields in _LEASTS for field in fields.split()}
_BELOW = {
    # The seed of a JAX key has 32 bits.
    "seed": 2**32,
    "optim.momentum": 1.0,
    "optim.peak_momentum": 1.0,
    "optim.b1": 1.0,
    "optim.b2": 1.0,
    "local.outer_momentum": 1.0,
}
_CHOICES = {
    "echo.where": ("host", "device"),
    "echo.mode": ("fixed", "adaptive", "stochastic"),
    "optim.scale": ("none", "linear", "sqrt"),
    "batch.statistics": ("all", "device"),
    "batch.norm": ("moving", "last", "recompute"),
    "local.schedule": ("none", *MEETING),
    "local.outer": ("mean", "nesterov"),
    "precision.compute": ("float32", "bfloat16", "float16"),
    "precision.params": ("float32", "bfloat16", "float16"),
    "precision.reduce": ("auto", "float32", "bfloat16", "float16"),
    "precision.loss_scale": ("none", "static", "dynamic"),
    "xla.preset": ("default", "fuse", "overlap", "serial"),
}


def check_config(config: Config) -> None:
    """Refuses impossible values; the error names field, value and fix."""
    if missing := missing_field(config, default_config()):
        raise ValueError(
            f"the config has no field {missing!r}; let get_config() begin with "
            "echo_jax.config.default_config(), which has them all"
        )
    for field, least in _AT_LEAST.items():
        if not least <= field_of(config, field) < math.inf:
            _refuse(config, field, f"must be at least {least}", least)
    for field, bound in _BELOW.items():
        if field_of(config, field) >= bound:
            _refuse(config, field, f"must be below {bound}", _AT_LEAST[field])
    for field, choices in _CHOICES.items():
        if field_of(config, field) not in choices:
            known = ", ".join(choices)
            _refuse(config, field, f"must be one of {known}", choices[0])
    for field, usual in (
        ("optim.lr", 0.001),
        ("optim.trust_coefficient", 0.001),
        ("optim.trust_clip", 10.0),
        ("precision.init", 32768.0),
        ("precision.min_scale", 1.0),
    ):
        if not 0 < field_of(config, field) < math.inf:
            _refuse(config, field, "must be above 0", usual)
    for field in ("start_fraction", "end_fraction"):
        if config.optim[field] > 1:
            _refuse(config, f"optim.{field}", "must be at most 1", 0.01)
    for idle in idle_fields(config, default_config()):
        _refuse(config, idle.field, idle.rule, idle.usual)
    _check_specs(config)
    _check_echo(config)
    if not math.isfinite(config.target):
        _refuse(config, "target", "must be finite; 0 means no target", 0.0)
    if config.optim.name not in OWN_OPTIMIZERS:
        optax_factory(config.optim.name, config.optim.args)
    _check_scale(config)
    _check_schedule(config)
    precision = config.precision
    if precision.loss_scale == "dynamic" and precision.init < precision.min_scale:
        rule = f"must be at least config.precision.min_scale={precision.min_scale}"
        _refuse(config, "precision.init", rule, precision.min_scale)
    _check_mesh(config)
    _check_growth(config)
    _check_distributed(config)
    _check_profile(config)
    _check_branches(config)
    for field, rule, fix in broken_rules(config):
        _refuse(config, field, rule, fix)


def _check_branches(config: Config) -> None:
    """Refuses branches on fresh data that cannot be compared with the run."""
    every = config.probe_repeats
    if not every:
        return
    if every % config.eval_every:
        rule = f"must be a multiple of config.eval_every={config.eval_every}"
        _refuse(config, "probe_repeats", rule, 10 * config.eval_every)
    for field, usual in (("local.schedule", "none"), ("batch.boundaries", ())):
        value = field_of(config, field)
        if value != usual:
            rule = f"does not go with config.{field}={value!r}"
            _refuse(config, "probe_repeats", rule, 0)


def _refuse(config: Config, field: str, rule: str, fix: Any) -> None:
    raise ValueError(
        f"config.{field}={field_of(config, field)!r} {rule}; set --config.{field}={fix}"
    )


def _check_specs(config: Config) -> None:
    """Lets the pipeline and the echo check their own fields."""
    with _named("config"):
        PipelineSpec.from_config(config)
    if config.echo.mode == "stochastic":
        with _named("config.echo.fetch"):
            fetch_schedule(config)
    with _named("config.echo"):
        echo_spec(config)


@contextlib.contextmanager
def _named(group: str) -> Iterator[None]:
    """Puts the group before the field name that starts most ValueErrors."""
    try:
        yield
    except ValueError as error:
        join = "." if re.match(r"[\w.]+(=| must )", str(error)) else ": "
        text = re.sub(r"Use (\w+=)", rf"Use --{group}.\1", str(error))
        raise ValueError(f"{group}{join}{text}") from error


def _check_echo(config: Config) -> None:
    """Refuses an echo that its place, or its mode, makes impossible."""
    if config.echo.where == "device":
        if config.echo.after not in ("decode", "augment"):
            rule = "goes with echo.where=host; a device echoes decoded examples"
            _refuse(config, "echo.after", rule, "decode")
        lanes = config.echo.lanes
        if lanes and config.batch_size % lanes:
            rule = f"must divide config.batch_size={config.batch_size}"
            _refuse(config, "echo.lanes", rule, math.gcd(lanes, config.batch_size))
    if config.echo.mode == "adaptive" and not config.data.prefetch:
        rule = "reads when asked, so that nothing is ever ready for adaptive echo"
        _refuse(config, "data.prefetch", rule, 4)
    pattern_of(config)


def _check_scale(config: Config) -> None:
    optim = config.optim
    ratio = config.batch_size / optim.reference_batch
    if optim.scale != "sqrt" or optim.name not in ("adamw", "lamb"):
        return
    for field in ("b1", "b2"):
        if ratio * (1 - optim[field]) >= 1:
            rule = (
                f"would be below 0 in a batch {ratio:g} times as large as "
                f"config.optim.reference_batch={optim.reference_batch}, as scale=sqrt "
                "forgets faster by as much"
            )
            _refuse(config, f"optim.{field}", rule, round(1 - 0.1 / ratio, 6))


def _check_schedule(config: Config) -> None:
    optim = config.optim
    schedule, total = optim.schedule, optim.decay_updates or config.updates
    if schedule not in OWN_SCHEDULES:
        optax_schedule(schedule, optim.schedule_args)
    _check_boundaries(config)
    has_end = schedule in ("linear", "cosine", "warmup_stable_decay")
    if has_end and optim.warmup_updates >= total:
        rule = f"must be below the {total} updates after which the schedule ends"
        _refuse(config, "optim.warmup_updates", rule, 0)
    if schedule == "onecycle" and not 0 < optim.peak_at < 1:
        _refuse(config, "optim.peak_at", "must lie between 0 and 1", 0.3)
    most = total - max(1, optim.warmup_updates)
    if schedule == "warmup_stable_decay" and optim.cooldown_updates > most:
        rule = f"must be at most the {most} updates that follow the warm-up"
        _refuse(config, "optim.cooldown_updates", rule, max(1, most // 10))


def _check_boundaries(config: Config) -> None:
    optim = config.optim
    boundaries = tuple(optim.boundaries)
    if optim.schedule not in ("piecewise", "slow_start"):
        return
    starts = (optim.warmup_updates, *boundaries)
    are_updates = all(type(each) is int and each < 2**31 for each in boundaries)
    is_rising = are_updates and all(a < b for a, b in itertools.pairwise(starts))
    is_open = optim.schedule == "slow_start" and not boundaries
    if not is_open and not (boundaries and is_rising):
        first = optim.warmup_updates
        rule = f"must be rising numbers of updates above the {first} of the warm-up"
        fix = f"({first + config.updates // 2},)"
        _refuse(config, "optim.boundaries", rule, fix)
    if optim.schedule == "slow_start":
        _check_fractions(config)


def _check_fractions(config: Config) -> None:
    fractions = tuple(config.optim.fractions)
    count = len(config.optim.boundaries) or len(SLOW_START_ENDS)
    are_parts = all(
        isinstance(each, int | float) and 0 < each <= 1 for each in fractions
    )
    if len(fractions) != count + 1 or not are_parts:
        rule = f"must be {count + 1} numbers above 0 and at most 1, for {count} changes"
        fix = tuple(round(0.5 * 0.1**k, 6) for k in range(count + 1))
        _refuse(config, "optim.fractions", rule, fix)


def _check_mesh(config: Config) -> None:
    mesh = config.mesh
    if mesh.data != -1 and mesh.data < 1:
        _refuse(config, "mesh.data", "must be at least 1, or -1 for all devices", -1)
    ways = mesh.fsdp * max(mesh.data, 1)
    if config.batch_size % ways:
        multiple = math.ceil(config.batch_size / ways) * ways
        rule = f"must be a multiple of the {ways} devices of config.mesh"
        _refuse(config, "batch_size", rule, multiple)
    by_hand = {"batch.micro": 1, "batch.statistics": "all", "precision.reduce": "auto"}
    for field, usual in by_hand.items():
        if mesh.fsdp > 1 and field_of(config, field) != usual:
            rule = f"needs whole parameters on every device, not mesh.fsdp={mesh.fsdp}"
            _refuse(config, field, rule, usual)


def _check_growth(config: Config) -> None:
    batch, growth = config.batch, BatchGrowth.of(config)
    if not growth and not growth.factors:
        return
    ends = growth.boundaries
    are_updates = all(type(each) is int and 0 < each < 2**31 for each in ends)
    if not are_updates or list(ends) != sorted({*ends}):
        rule = "must be numbers of updates, each above the one before"
        fix = tuple(sorted({*ends})) if are_updates else ()
        _refuse(config, "batch.boundaries", rule, fix)
    is_whole = all(type(each) is int and each > 1 for each in growth.factors)
    if len(growth.factors) != len(ends) or not is_whole:
        rule = f"must be {len(ends)} whole numbers above 1, one for each boundary"
        _refuse(config, "batch.factors", rule, (2,) * len(ends))
    parts = growth.parts(0)
    if config.batch_size % parts:
        rule = f"must be a multiple of {parts}, as often as the batch grows"
        multiple = math.ceil(config.batch_size / parts) * parts
        _refuse(config, "batch_size", rule, multiple)
    if split := growth.first_split():
        rule = f"has {split[0]}, where a batch of batch_size is not used up"
        fix = tuple(split[1] if each == split[0] else each for each in batch.boundaries)
        _refuse(config, "batch.boundaries", rule, fix)
    needed = {"echo.mode": "fixed", "optim.scale": "linear", "dispatch.steps": 1}
    allowed = {"optim.scale": ("none", "linear")}
    for field, fix in needed.items():
        if field_of(config, field) not in allowed.get(field, (fix,)):
            _refuse(config, field, "does not go with batch.boundaries", fix)


def _check_distributed(config: Config) -> None:
    wanted, shards = config.distributed, config.data.shards
    if wanted.process_id >= wanted.num_processes:
        rule = f"must be below config.distributed.num_processes={wanted.num_processes}"
        _refuse(config, "distributed.process_id", rule, 0)
    if not wanted.coordinator and wanted.num_processes > 1:
        rule = "needs --config.distributed.coordinator=HOST:PORT"
        _refuse(config, "distributed.num_processes", rule, 1)
    if shards and config.batch_size % shards:
        rule = f"must divide config.batch_size={config.batch_size}"
        _refuse(config, "data.shards", rule, math.gcd(shards, config.batch_size))


def _check_profile(config: Config) -> None:
    last = config.profile.start + config.profile.updates
    if config.profile.updates and last > config.updates:
        rule = f"ends after the {config.updates} updates of the run"
        fix = max(config.updates - config.profile.updates, 0)
        _refuse(config, "profile.start", rule, fix)
