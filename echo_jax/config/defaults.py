"""The fields of every training config, and the loading of configs.

The names are a contract: run folders, sweeps and notebooks rely on them. A
config file starts from `default_config`, sets the fields of its experiment,
and adds ``model``.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from ml_collections import ConfigDict

from echo_jax.config.applies import leave_out
from echo_jax.config.files import failures_of, find_config, import_config

Config: TypeAlias = Any
"""A `ConfigDict`. Its fields have types when it runs, but none that a type checker
knows, which would take ``config.echo.factor`` for an error."""


def default_config() -> Config:
    """Returns the shared fields with their defaults, locked.

    Fields keep their types: ``2.5`` is refused for an integer field, and ``3`` becomes
    ``3.0`` in a float field. Sizes are per update over all devices, times are seconds,
    and every schedule is indexed by updates.
    """
    config = ConfigDict()
    config.workload = "lm"
    config.seed = 0
    # A run folder, or a file of 'echo-jax export --to safetensors'. The run starts
    # with its arrays of the same name and shape.
    config.init_from = ""
    config.updates = 1000
    config.batch_size = 32
    # 0: no target. Neither a loss of 0 nor an accuracy of 0 can be a target.
    config.target = 0.0
    config.stop_at_target = False
    config.log_every = 50
    config.log = ConfigDict()
    # Additional logs in WORKDIR: tensorboard, wandb.
    config.log.to = ()
    config.eval_every = 100
    # Updates between branches. A branch trains only on fresh data until the next
    # evaluation, to measure the worth of repeats. 0: no branches.
    config.probe_repeats = 0
    # Updates between checkpoints; 0: only at the end. A stop by a signal always saves.
    config.checkpoint_every = 200
    config.keep_checkpoints = 2

    config.echo = ConfigDict()
    config.echo.factor = 1.0  # uses of an item; `echo-jax probe` measures R
    config.echo.after = "batch"  # read | decode | augment | batch
    # consecutive | window_shuffle | shuffle_buffer (the paper's) | spread
    config.echo.order = "consecutive"
    # Fresh items of the echoed stage; for order shuffle_buffer, their uses.
    config.echo.buffer = 1
    config.echo.seed = 0
    config.echo.where = "host"  # host | device: the place of the buffer
    config.echo.mode = "fixed"  # fixed | adaptive | stochastic
    # The maximum uses of an item for an adaptive echo. It needs more than R, or it
    # repeats whole batches back to back.
    config.echo.max_uses = 4
    # Its minimum. Above 1 where the loader takes the step's cores: `echo-jax probe`.
    config.echo.min_uses = 1
    # Adaptive: the tape.json of a run to repeat, or fixed decisions for all updates:
    # "pattern:1000" takes fresh data before every fourth update.
    config.echo.replay = ""
    config.echo.buffer_bytes = 0  # size of a device buffer; 0: echo.buffer sets it
    config.echo.lanes = 0  # parts of a device buffer; 0: one for each device
    # Stochastic: the probability p that an update loads fresh data, or e = 1/p.
    config.echo.fetch = ConfigDict()
    config.echo.fetch.quantity = "p"  # p | e
    config.echo.fetch.schedule = "constant"  # constant | linear | cosine | multistep
    config.echo.fetch.start = 1.0
    config.echo.fetch.end = 1.0
    config.echo.fetch.updates = 1

    config.optim = ConfigDict()
    # adamw, sgd, lars, lamb, rmsprop_warmup, or an optimizer of optax, such as
    # optax.lion or optax.contrib.muon. An optimizer of optax uses only args, the
    # learning rate with its schedule, and clip_norm.
    config.optim.name = "adamw"
    config.optim.args = "{}"  # other arguments of an optimizer of optax, as JSON
    config.optim.lr = 1e-3
    # The growth of lr with the batch size, relative to reference_batch:
    # none | linear | sqrt
    config.optim.scale = "none"
    config.optim.reference_batch = 256
    # constant | linear | cosine | piecewise | slow_start | onecycle | cyclic |
    # warmup_stable_decay, or a schedule of optax, such as optax.exponential_decay
    config.optim.schedule = "constant"
    config.optim.schedule_args = "{}"  # arguments of a schedule of optax, as JSON
    config.optim.warmup_updates = 0
    config.optim.start_fraction = 0.0  # first learning rate / peak; 0: near 0
    config.optim.decay_updates = 0  # 0: all of config.updates
    config.optim.end_fraction = 0.01  # last learning rate / peak
    # Updates after which the rate drops (piecewise) or changes (slow_start).
    config.optim.boundaries = ()
    config.optim.boundary_scale = 0.1  # factor on the rate at each boundary
    config.optim.fractions = (0.5, 0.075, 0.01, 0.001)  # slow_start: rate / peak
    config.optim.peak_at = 0.3  # onecycle: fraction of the updates before the peak
    config.optim.peak_momentum = 0.85  # onecycle: momentum, or b1, at the peak
    config.optim.cycle_updates = 2000  # cyclic: length of a cycle
    config.optim.cooldown_updates = 100  # warmup_stable_decay: length of the decay
    config.optim.momentum = 0.9
    config.optim.nesterov = True
    config.optim.b1 = 0.9
    config.optim.b2 = 0.95
    config.optim.eps = 1e-8  # for adamw and lamb
    config.optim.weight_decay = 0.0
    config.optim.decay_vectors = False  # whether to decay biases and scales of norms
    config.optim.clip_norm = 0.0  # 0: no clipping
    config.optim.trust_coefficient = 0.001  # lars: factor on the ratio of norms
    config.optim.trust_clip = 10.0  # lamb: maximum norm of an array in the ratio
    # rmsprop_warmup: updates until half of a step is SGD's; 10 epochs in the paper.
    config.optim.transition_updates = 1000

    config.model = ConfigDict()

    config.precision = ConfigDict()
    config.precision.compute = "float32"  # float32 | bfloat16 | float16
    # The type of stored parameters between updates; the optimizer computes in float32.
    config.precision.params = "float32"  # float32 | bfloat16 | float16
    # The type in which devices sum gradients: auto | float32 | bfloat16 | float16.
    # auto: the choice of XLA, which may be precision.compute.
    config.precision.reduce = "auto"
    # The loss is multiplied by a scale and the gradient divided by it. An update whose
    # gradient is not finite is skipped: none | static | dynamic
    config.precision.loss_scale = "none"
    config.precision.init = 32768.0  # the first scale, or the static one
    # Dynamic: the scale doubles after this number of updates without a skip in a row.
    config.precision.growth = 2000
    config.precision.min_scale = 1.0  # dynamic: an overflow there ends the run

    config.data = ConfigDict()
    config.data.source = ""
    config.data.pipeline = "grain"  # grain | tfdata: the library that runs the stages
    config.data.workers = 0  # processes; 0: threads read and decode
    config.data.threads = 1  # concurrent reads
    config.data.prefetch = 4  # batches made ahead of the trainer
    config.data.eval_examples = 0  # 0: the whole evaluation split
    # A longer wait for data saves and ends the run; 0: no limit.
    config.data.timeout_s = 1800.0
    # Whether to look for NaN and infinity in fresh items that enter the echo. The first
    # such item ends the run.
    config.data.check_finite = True
    config.data.storage = ConfigDict()
    config.data.storage.latency_s = 0.0  # mean latency of a read
    config.data.storage.bytes_per_s = 0.0  # 0: unlimited
    config.data.storage.distribution = "constant"  # constant | exponential | bursty

    config.batch = ConfigDict()
    config.batch.micro = 1  # gradient accumulation: parts on each device
    # Updates after which the batch grows by each of the factors, up to batch_size.
    config.batch.boundaries = ()
    config.batch.factors = ()
    # The examples for batch norm statistics: all | device. They are of an update
    # or, with micro above 1, of a part of it. Replicas have their own statistics.
    config.batch.statistics = "all"
    # The batch norm statistics in evaluation: moving (averages over updates) | last (of
    # the last update) | recompute (of norm_batches fresh batches, each time)
    config.batch.norm = "moving"
    config.batch.norm_batches = 16

    # Replicas, one on each device, with their own parameters, which synchronise rarely.
    config.local = ConfigDict()
    # When replicas synchronise: none (one model) | every (`every` updates) | bernoulli
    # (with probability p) | fetch (after updates that fetch fresh data in a stochastic
    # echo) | cosine | linear | multistep (with a probability from p to p_end)
    config.local.schedule = "none"
    config.local.every = 1
    config.local.p = 1.0
    config.local.p_end = 1.0
    config.local.start_after = 0  # initial updates that all synchronise
    # The common parameters: mean | nesterov (DiLoCo: a step from the last common ones)
    config.local.outer = "mean"
    config.local.outer_lr = 0.7
    config.local.outer_momentum = 0.9
    # Without replicas: the delay of gradients, in updates, of simulated asynchronous
    # SGD.
    config.local.staleness = 0

    config.dispatch = ConfigDict()
    config.dispatch.steps = 1  # updates in one program, by lax.scan

    # Data shards; 0: one for each process. Any number of processes that divides the
    # shards can resume the run.
    config.data.shards = 0

    config.distributed = ConfigDict()
    config.distributed.detect = True  # find other processes as jax does
    config.distributed.coordinator = ""  # HOST:PORT of the first process
    config.distributed.num_processes = 1
    config.distributed.process_id = 0

    config.profile = ConfigDict()
    # Updates traced with jax's profiler, into WORKDIR/profile; 0: none.
    config.profile.updates = 0
    config.profile.start = 20  # warm-up updates before the trace

    config.xla = ConfigDict()
    # The sum of gradients over GPUs or TPUs: default | fuse | overlap | serial
    config.xla.preset = "default"
    config.xla.options = "{}"  # options of the compiled update, as JSON

    config.mesh = ConfigDict()
    config.mesh.data = -1  # -1: all devices / fsdp
    config.mesh.fsdp = 1
    return config.lock()


def load_config(name: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Loads a config file, as ``--config`` does on the command line.

    Args:
      name: ``"PATH.py"`` or ``"PATH.py:VARIANT"``, or the name of a packaged config,
        such as ``"lm"`` or ``"sweeps/s1_placement:tiny"``. The file defines
        ``get_config(variant)``; without a variant it is called without arguments.
      overrides: Changed fields: nested (``{"echo": {"factor": 2.0}}``), by dotted
        names (``{"echo.factor": 2.0}``), or both. Fields of the file that have no
        effect with them are reset, which is printed on standard error. An example is
        ``optim.clip_norm`` with ``{"optim.name": "lars"}``.

    Returns:
      The config, locked: of a training or of a study. `check_config` checks the former.

    Raises:
      FileNotFoundError: The file does not exist.
      OSError: The file cannot be read.
      AttributeError: The file defines no ``get_config``, or an override names a
        field that the config does not have.
      TypeError: An override has another type than the field.
      ValueError: The file fails, or does not return a config.

    Example:
      >>> config = load_config("configs/lm.py:tiny", {"echo.factor": 2.0})
      >>> config.echo.factor
      2.0
    """
    file, _, variant = name.partition(":")
    path = find_config(file)
    module = import_config(path)
    variants = (variant,) if variant else ()
    _check_call(file, module.get_config, variants)
    with failures_of(path):
        config = module.get_config(*variants)
    if not isinstance(config, ConfigDict):
        raise ValueError(
            f"get_config() of {file} returned {config!r:.60}; it has to return an "
            "ml_collections.ConfigDict, such as default_config() changed"
        )
    before = copy.deepcopy(config)
    override(config, overrides or {})
    leave_out(config, default_config(), [*_names(overrides or {})], before)
    return config.lock()


def _names(overrides: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the dotted names of the fields that are set."""
    for name, value in overrides.items():
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _check_call(
    file: str, get_config: Callable[..., Any], variants: tuple[str, ...]
) -> None:
    """Refuses an unknown variant argument, and a missing one."""
    try:
        inspect.signature(get_config).bind(*variants)
    except TypeError as error:
        raise ValueError(
            f"config {file!r} has no variants; leave :{variants[0]} out"
            if variants
            else f"config {file!r} needs a variant: give {file}:VARIANT, or let "
            "get_config() be called without one"
        ) from error


def override(config: Config, overrides: Mapping[str, Any], prefix: str = "") -> None:
    """Sets fields of a config.

    Args:
      config: The config; it is changed.
      overrides: See `load_config`.
      prefix: Precedes the names of fields in errors.

    Raises:
      AttributeError: The field does not exist.
      TypeError: The value has another type than the field.
    """
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
            override(config[field], value, f"{prefix}{field}.")
            continue
        try:
            config[field] = value
        except TypeError as error:
            kind = config.get_type(field)
            if kind not in (bool, float, int, str, tuple):
                raise  # One of our fields, whose error names the valid values.
            raise TypeError(
                f"config.{prefix}{field}={value!r} is no {kind.__name__}, and the "
                f"field holds one: {config[field]!r}"
            ) from error
