"""The fields that every training config has, and how a config is loaded.

The names are a contract: run folders, sweeps and notebooks rely on them. A
config file starts from `default_config`, sets what its experiment differs in,
and adds ``model``.
"""

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ml_collections import ConfigDict

from echo_jax.config_factor import factor_field

__all__ = ["Config", "check_config", "default_config", "load_config"]

Config: TypeAlias = Any
"""A `ConfigDict`. Its fields have types when it runs, but none that a type checker
knows, which would take ``config.echo.factor`` for an error."""

_AT_LEAST = {
    "seed": 0,
    "updates": 1,
    "batch_size": 1,
    "log_every": 1,
    "eval_every": 1,
    "checkpoint_every": 0,
    "keep_checkpoints": 1,
    "echo.buffer": 1,
    "echo.seed": 0,
    "echo.cap": 1,
    "echo.buffer_bytes": 0,
    "echo.lanes": 0,
    "echo.load.updates": 1,
    "inner.updates": 0,
    "optim.warmup_updates": 0,
    "optim.decay_updates": 0,
    "optim.end_fraction": 0.0,
    "optim.momentum": 0.0,
    "optim.b1": 0.0,
    "optim.b2": 0.0,
    "optim.weight_decay": 0.0,
    "optim.clip_norm": 0.0,
    "data.workers": 0,
    "data.threads": 0,
    "data.prefetch": 0,
    "data.eval_examples": 0,
    "data.storage.latency_s": 0.0,
    "data.storage.bytes_per_s": 0.0,
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
    "echo.after": ("read", "decode", "augment", "batch"),
    "echo.order": ("consecutive", "shuffle", "spread"),
    "echo.where": ("host", "device"),
    "echo.mode": ("fixed", "adaptive", "stochastic"),
    "echo.load.of": ("p", "e"),
    "echo.load.schedule": ("constant", "linear", "cosine", "multistep"),
    "inner.strategy": ("auto", "loop", "unroll", "scan"),
    "optim.name": ("adamw", "sgd"),
    "optim.schedule": ("constant", "linear", "cosine"),
    "data.storage.distribution": ("constant", "exponential", "bursty"),
}


def default_config() -> Config:
    """Returns the shared fields with their defaults, locked.

    Integer and float fields keep their type: ``3`` is refused for a float.
    Sizes are per update over all devices, times are seconds, and every
    schedule is indexed by updates.
    """
    config = ConfigDict()
    config.workload = "lm"
    config.seed = 0
    config.updates = 1000
    config.batch_size = 32
    # 0 is "no target": neither a loss of 0 nor an accuracy of 0 is one.
    config.target = 0.0
    config.stop_at_target = False
    config.log_every = 50
    config.eval_every = 100
    # 0 saves at the end only. A stop by Ctrl-C or SIGTERM always saves.
    config.checkpoint_every = 200
    config.keep_checkpoints = 2

    config.echo = ConfigDict()
    # A number, or "auto": R as measured at the start, at most echo.cap.
    config.echo.factor = factor_field(1.0)
    config.echo.after = "batch"  # read | decode | augment | batch
    config.echo.order = "consecutive"  # consecutive | shuffle | spread
    config.echo.buffer = 1  # fresh items of the stage that is echoed
    config.echo.seed = 0
    config.echo.where = "host"  # host | device: where the buffer lies
    config.echo.mode = "fixed"  # fixed | adaptive | stochastic
    # The uses after which a repeat is worth nothing: bounds adaptive and "auto".
    config.echo.cap = 4
    config.echo.replay = ""  # the tape.json of an adaptive run, to be repeated
    config.echo.buffer_bytes = 0  # of a device buffer; 0: echo.buffer says its size
    config.echo.lanes = 0  # parts of a device buffer; 0: one for each device
    # Stochastic: how likely an update loads fresh data (p), or 1/p (e), over updates.
    config.echo.load = ConfigDict()
    config.echo.load.of = "p"  # p | e
    config.echo.load.schedule = "constant"  # constant | linear | cosine | multistep
    config.echo.load.start = 1.0
    config.echo.load.end = 1.0
    config.echo.load.updates = 1

    config.optim = ConfigDict()
    config.optim.name = "adamw"  # adamw | sgd
    config.optim.lr = 1e-3
    config.optim.schedule = "constant"  # constant | linear | cosine
    config.optim.warmup_updates = 0
    config.optim.decay_updates = 0  # 0: all of config.updates
    config.optim.end_fraction = 0.01  # the last learning rate, of the peak
    config.optim.momentum = 0.9
    config.optim.nesterov = True
    config.optim.b1 = 0.9
    config.optim.b2 = 0.95
    config.optim.weight_decay = 0.0
    config.optim.clip_norm = 0.0  # 0: no clipping

    config.model = ConfigDict()

    config.data = ConfigDict()
    config.data.source = ""
    config.data.workers = 0  # processes; 0 reads and decodes in threads
    config.data.threads = 1  # concurrent reads
    config.data.prefetch = 4  # batches made ahead of the trainer
    config.data.eval_examples = 0  # 0: the whole evaluation split
    config.data.hold_batch = False  # train on one batch only: the ceiling of speed
    config.data.storage = ConfigDict()
    config.data.storage.latency_s = 0.0  # mean time until a read answers
    config.data.storage.bytes_per_s = 0.0  # 0: unlimited
    config.data.storage.distribution = "constant"  # constant | exponential | bursty

    config.inner = ConfigDict()
    config.inner.strategy = "auto"  # auto | loop | unroll | scan
    config.inner.updates = 0  # updates for each dispatch; 0: chosen, at most 8

    config.mesh = ConfigDict()
    config.mesh.data = -1  # -1: all devices that fsdp leaves
    config.mesh.fsdp = 1
    return config.lock()


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
    _check_factor(config)
    _check_where(config)
    _check_mode(config)
    _check_load(config)
    _check_inner(config)
    _check_target(config)
    _check_schedule(config)
    _check_mesh(config)


def load_config(name: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Loads a config file, as ``--config`` does on the command line.

    Args:
      name: ``"PATH.py"`` or ``"PATH.py:VARIANT"``. The file defines
        ``get_config(variant)``; without a variant it is called without arguments.
      overrides: What differs: nested (``{"echo": {"factor": 2.0}}``), by dotted
        names (``{"echo.factor": 2.0}``), or both.

    Returns:
      The config, locked. It may be of a study; `check_config` is for training.

    Raises:
      FileNotFoundError: There is no such file.
      AttributeError: The file defines no ``get_config``, or an override names a
        field that the config does not have.
      TypeError: An override is of another type than the field.

    Example:
      >>> config = load_config("configs/lm.py:tiny", {"echo.factor": 2.0})
      >>> config.echo.factor
      2.0
    """
    file, _, variant = name.partition(":")
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(
            f"config {file!r} is no file, looked up from {Path.cwd()}; "
            "give PATH.py or PATH.py:VARIANT"
        )
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        raise FileNotFoundError(f"config {file!r} is no Python file; give PATH.py")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise AttributeError(f"{file} defines no get_config(); add that function")
    config = module.get_config(variant) if variant else module.get_config()
    _override(config, overrides or {}, prefix="")
    return config.lock()


def _override(config: Config, overrides: Mapping[str, Any], prefix: str) -> None:
    for name, value in overrides.items():
        field, _, rest = name.partition(".")
        if field not in config:
            raise AttributeError(
                f"config has no field {prefix + field!r}; "
                f"it has {', '.join(prefix + known for known in sorted(config))}"
            )
        if rest:
            value = {rest: value}
        if isinstance(value, Mapping) and isinstance(config[field], ConfigDict):
            _override(config[field], value, f"{prefix}{field}.")
        else:
            config[field] = value


def _get(config: Config, field: str) -> Any:
    for name in field.split("."):
        config = config[name]
    return config


def _refuse(config: Config, field: str, rule: str, fix: Any) -> None:
    raise ValueError(
        f"config.{field}={_get(config, field)!r} {rule}; set --config.{field}={fix}"
    )


def _check_factor(config: Config) -> None:
    factor = config.echo.factor
    if factor != "auto" and not (math.isfinite(factor) and factor >= 1):
        _refuse(config, "echo.factor", "must be at least 1.0, or 'auto'", 1.0)


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
    if config.echo.mode != "fixed":
        rule = "needs --config.echo.where=device"
        _refuse(config, "echo.mode", rule, "fixed")


def _check_mode(config: Config) -> None:
    mode = config.echo.mode
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
    load = config.echo.load
    if config.echo.mode != "stochastic":
        for name, default in default_config().echo.load.items():
            if load[name] != default:
                rule = "needs --config.echo.mode=stochastic"
                _refuse(config, f"echo.load.{name}", rule, default)
        return
    for name in ("start", "end"):
        value = load[name]
        if load.of == "p" and not 0 < value <= 1:
            rule = "is a probability, above 0 and at most 1"
            _refuse(config, f"echo.load.{name}", rule, 1.0)
        if load.of == "e" and not (math.isfinite(value) and value >= 1):
            _refuse(config, f"echo.load.{name}", "is a factor, at least 1", 1.0)
    if load.schedule == "constant" and load.start != load.end:
        rule = f"must be echo.load.start={load.start} in a constant schedule"
        _refuse(config, "echo.load.end", rule, load.start)


def _check_inner(config: Config) -> None:
    strategy, updates = config.inner.strategy, config.inner.updates
    if strategy == "loop" and updates > 1:
        _refuse(config, "inner.updates", "needs another inner.strategy than loop", 0)
    if config.echo.mode == "adaptive" and strategy in ("unroll", "scan"):
        rule = "would decide adaptive draws too far ahead"
        _refuse(config, "inner.strategy", rule, "loop")


def _check_target(config: Config) -> None:
    if not math.isfinite(config.target):
        _refuse(config, "target", "must be finite; 0 means no target", 0.0)
    if config.stop_at_target and not config.target:
        _refuse(config, "stop_at_target", "needs a target", False)


def _check_schedule(config: Config) -> None:
    total = config.optim.decay_updates or config.updates
    if config.optim.schedule == "constant":
        return
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
