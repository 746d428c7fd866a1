"""What a training config may say: the range of every shared field, and what fits.

It looks at the shared fields alone, and at no device: what depends on the machine is
checked when the mesh is made, and ``model`` by its workload. What the dataclasses of an
echo and of a pipeline say of their fields is not said again.
"""

import contextlib
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

from echo_jax.config import Config, default_config
from echo_jax.config_echo import echo_spec, load_schedule
from echo_jax.config_optimizer import OWN_OPTIMIZERS, optax_factory, parse_args
from echo_jax.data.pipeline_spec import PipelineSpec

__all__ = ["check_config"]

_AT_LEAST = {
    "seed": 0,
    "updates": 1,
    "batch_size": 1,
    "log_every": 1,
    "eval_every": 1,
    "checkpoint_every": 0,
    "keep_checkpoints": 1,
    "echo.cap": 1,
    "echo.buffer_bytes": 0,
    "echo.lanes": 0,
    "dispatch.steps": 0,
    "optim.warmup_updates": 0,
    "optim.decay_updates": 0,
    "optim.end_fraction": 0.0,
    "optim.boundary_scale": 0.0,
    "optim.momentum": 0.0,
    "optim.b1": 0.0,
    "optim.b2": 0.0,
    "optim.weight_decay": 0.0,
    "optim.clip_norm": 0.0,
    "data.eval_examples": 0,
    "data.shards": 0,
    "data.timeout_s": 0.0,
    "distributed.num_processes": 1,
    "distributed.process_id": 0,
    "profile.updates": 0,
    "profile.start": 0,
    "mesh.fsdp": 1,
}
_BELOW = {
    # The seed of a JAX key is 32 bits wide.
    "seed": 2**32,
    "optim.momentum": 1.0,
    "optim.b1": 1.0,
    "optim.b2": 1.0,
}
_CHOICES = {
    "echo.where": ("host", "device"),
    "echo.mode": ("fixed", "adaptive", "stochastic"),
    "dispatch.mode": ("auto", "loop", "unroll", "scan"),
    "optim.schedule": ("constant", "linear", "cosine", "piecewise"),
}


def check_config(config: Config) -> None:
    """Refuses values that no run can mean.

    It looks at the shared fields alone, and at no device: what depends on the
    machine is checked when the mesh is made, and ``model`` by its workload.

    Args:
      config: The config of a training run.

    Raises:
      ValueError: A field is out of its range; the message names the field, its
        value and the fix.

    Example:
      >>> config = default_config()
      >>> config.batch_size = 0
      >>> check_config(config)
      Traceback (most recent call last):
      ValueError: config.batch_size=0 must be at least 1; set --config.batch_size=1
    """
    for field, least in _AT_LEAST.items():
        value = _get(config, field)
        if not (math.isfinite(value) and value >= least):
            _refuse(config, field, f"must be at least {least}", least)
    for field, bound in _BELOW.items():
        if _get(config, field) >= bound:
            _refuse(config, field, f"must be below {bound}", _AT_LEAST[field])
    for field, choices in _CHOICES.items():
        if _get(config, field) not in choices:
            known = ", ".join(choices)
            _refuse(config, field, f"must be one of {known}", choices[0])
    if not (math.isfinite(config.optim.lr) and config.optim.lr > 0):
        _refuse(config, "optim.lr", "must be above 0", 0.001)
    if config.optim.end_fraction > 1:
        _refuse(config, "optim.end_fraction", "must be at most 1", 0.01)
    _check_specs(config)
    _check_where(config)
    _check_mode(config)
    _check_dispatch(config)
    _check_target(config)
    _check_optimizer(config)
    _check_schedule(config)
    _check_mesh(config)
    _check_distributed(config)
    _check_profile(config)


def _get(config: Config, field: str) -> Any:
    for name in field.split("."):
        config = config[name]
    return config


def _refuse(config: Config, field: str, rule: str, fix: Any) -> None:
    raise ValueError(
        f"config.{field}={_get(config, field)!r} {rule}; set --config.{field}={fix}"
    )


def _check_specs(config: Config) -> None:
    """Has the pipeline and the echo look at what they are made of."""
    if config.data.threads == "auto" and config.data.workers:
        rule = f"is measured without workers, and data.workers={config.data.workers}"
        _refuse(config, "data.threads", rule, 1)
    with _named("config"):
        PipelineSpec.from_config(config)
    if config.echo.mode == "stochastic":
        with _named("config.echo.load"):
            load_schedule(config)
    with _named("config.echo"):
        echo_spec(config)


@contextlib.contextmanager
def _named(group: str) -> Iterator[None]:
    """Puts the group before the field, with which most errors of values begin."""
    try:
        yield
    except ValueError as error:
        join = "." if re.match(r"[\w.]+=", str(error)) else ": "
        raise ValueError(f"{group}{join}{error}") from error


def _check_where(config: Config) -> None:
    """Refuses what belongs to the other place, which would pass unnoticed."""
    if config.echo.where == "device":
        if config.echo.after not in ("decode", "augment"):
            rule = "goes with echo.where=host; a device echoes decoded examples"
            _refuse(config, "echo.after", rule, "decode")
        lanes = config.echo.lanes
        if lanes and config.batch_size % lanes:
            rule = f"must divide config.batch_size={config.batch_size}"
            _refuse(config, "echo.lanes", rule, math.gcd(lanes, config.batch_size))
        return
    for field in ("echo.lanes", "echo.buffer_bytes"):
        if _get(config, field):
            _refuse(config, field, "needs --config.echo.where=device", 0)


def _check_mode(config: Config) -> None:
    mode = config.echo.mode
    if mode != "stochastic":
        _check_load(config)
    if mode == "adaptive" and not config.data.prefetch:
        rule = "reads when asked, so that nothing is ever ready for adaptive echo"
        _refuse(config, "data.prefetch", rule, 4)
    if config.echo.replay and mode != "adaptive":
        rule = "repeats an adaptive run; it needs --config.echo.mode=adaptive"
        _refuse(config, "echo.replay", rule, "")
    if mode == "fixed":
        return
    if config.echo.factor != 1:
        bound = "echo.cap" if mode == "adaptive" else "echo.load"
        rule = f"belongs to mode fixed; mode {mode} goes by config.{bound}"
        _refuse(config, "echo.factor", rule, 1.0)
    if config.echo.order != "consecutive":
        rule = f"belongs to mode fixed; mode {mode} has an order of its own"
        _refuse(config, "echo.order", rule, "consecutive")


def _check_load(config: Config) -> None:
    for name, default in default_config().echo.load.items():
        if config.echo.load[name] != default:
            rule = "needs --config.echo.mode=stochastic"
            _refuse(config, f"echo.load.{name}", rule, default)


def _check_dispatch(config: Config) -> None:
    mode, steps = config.dispatch.mode, config.dispatch.steps
    if mode == "loop" and steps > 1:
        _refuse(config, "dispatch.steps", "needs another dispatch.mode than loop", 0)
    if config.echo.mode == "adaptive" and mode in ("unroll", "scan"):
        rule = "would decide adaptive draws too far ahead"
        _refuse(config, "dispatch.mode", rule, "loop")


def _check_target(config: Config) -> None:
    if not math.isfinite(config.target):
        _refuse(config, "target", "must be finite; 0 means no target", 0.0)
    if config.stop_at_target and not config.target:
        _refuse(config, "stop_at_target", "needs a target", False)


def _check_optimizer(config: Config) -> None:
    name, args = config.optim.name, config.optim.args
    if name not in OWN_OPTIMIZERS:
        optax_factory(name, args)
        if config.optim.weight_decay:
            rule = f"belongs to adamw and sgd; {name} has it in config.optim.args"
            _refuse(config, "optim.weight_decay", rule, 0.0)
    elif parse_args(args):
        rule = f"belongs to optimizers of optax; {name} has fields of its own"
        _refuse(config, "optim.args", rule, "{}")


def _check_schedule(config: Config) -> None:
    schedule, boundaries = config.optim.schedule, tuple(config.optim.boundaries)
    if schedule == "piecewise":
        starts = (config.optim.warmup_updates, *boundaries)
        are_updates = all(type(each) is int and each < 2**31 for each in boundaries)
        is_rising = are_updates and all(a < b for a, b in itertools.pairwise(starts))
        if not boundaries or not is_rising:
            first = config.optim.warmup_updates
            rule = f"must be rising numbers of updates above the {first} of the warm-up"
            fix = f"({first + config.updates // 2},)"
            _refuse(config, "optim.boundaries", rule, fix)
        return
    if boundaries:
        rule = "needs --config.optim.schedule=piecewise"
        _refuse(config, "optim.boundaries", rule, ())
    if schedule == "constant":
        return
    total = config.optim.decay_updates or config.updates
    if config.optim.warmup_updates >= total:
        rule = f"must be below the {total} updates after which the schedule ends"
        _refuse(config, "optim.warmup_updates", rule, 0)


def _check_mesh(config: Config) -> None:
    mesh = config.mesh
    if mesh.data != -1 and mesh.data < 1:
        _refuse(config, "mesh.data", "must be at least 1, or -1 for all devices", -1)
    ways = mesh.fsdp * max(mesh.data, 1)
    if config.batch_size % ways:
        multiple = math.ceil(config.batch_size / ways) * ways
        rule = f"must be a multiple of the {ways} devices of config.mesh"
        _refuse(config, "batch_size", rule, multiple)


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
