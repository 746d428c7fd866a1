"""The fields that every training config has, and how a config is loaded.

The names are a contract: run folders, sweeps and notebooks rely on them. A
config file starts from `default_config`, sets what its experiment differs in,
and adds ``model``.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from ml_collections import ConfigDict

from echo_jax.config.applies import leave_out
from echo_jax.config.auto import auto_field
from echo_jax.config.files import failures_of, find_config, import_config

__all__ = ["Config", "default_config", "load_config", "override"]

Config: TypeAlias = Any
"""A `ConfigDict`. Its fields have types when it runs, but none that a type checker
knows, which would take ``config.echo.factor`` for an error."""


def default_config() -> Config:
    """Returns the shared fields with their defaults, locked.

    Integer and float fields keep their type: ``3`` is refused for a float.
    Sizes are per update over all devices, times are seconds, and every
    schedule is indexed by updates.
    """
    config = ConfigDict()
    config.workload = "lm"
    config.seed = 0
    # A run folder, or a file of 'echo-jax export --to safetensors', whose arrays of the
    # same name and shape a run begins with.
    config.init_from = ""
    config.updates = 1000
    config.batch_size = 32
    # 0 is "no target": neither a loss of 0 nor an accuracy of 0 is one.
    config.target = 0.0
    config.stop_at_target = False
    config.log_every = 50
    config.log = ConfigDict()
    # Where else: tensorboard, wandb; into WORKDIR.
    config.log.to = ()
    config.eval_every = 100
    # After every so many updates a branch is trained on fresh data alone until the next
    # evaluation, to say what repeats are worth; 0: never.
    config.probe_repeats = 0
    # 0 saves at the end only. A stop by a signal always saves.
    config.checkpoint_every = 200
    config.keep_checkpoints = 2

    config.echo = ConfigDict()
    # A number, or "auto": R as measured at the start, at most echo.cap.
    config.echo.factor = auto_field(1.0)
    config.echo.after = "batch"  # read | decode | augment | batch
    # consecutive | shuffle (bounded delay) | shuffle_buffer (the paper's) | spread
    config.echo.order = "consecutive"
    # Fresh items of the stage that is echoed; their uses for order shuffle_buffer.
    config.echo.buffer = 1
    config.echo.seed = 0
    config.echo.where = "host"  # host | device: where the buffer lies
    config.echo.mode = "fixed"  # fixed | adaptive | stochastic
    # The uses after which a repeat is worth nothing: bounds adaptive and "auto". An
    # adaptive echo wants more than R, or it repeats whole batches back to back.
    config.echo.cap = 4
    # Adaptive: the tape.json of a run, to be repeated; or decisions made beforehand,
    # for all updates: "pattern:1000" takes fresh data before every fourth of them.
    config.echo.replay = ""
    config.echo.buffer_bytes = 0  # of a device buffer; 0: echo.buffer says its size
    config.echo.lanes = 0  # parts of a device buffer; 0: one for each device
    # Stochastic: how likely an update loads fresh data (p), or 1/p (e), over updates.
    config.echo.load = ConfigDict()
    config.echo.load.quantity = "p"  # p | e
    config.echo.load.schedule = "constant"  # constant | linear | cosine | multistep
    config.echo.load.start = 1.0
    config.echo.load.end = 1.0
    config.echo.load.updates = 1

    config.optim = ConfigDict()
    # adamw, sgd, lars, lamb, rmsprop_warmup, or any of optax, such as optax.lion or
    # optax.contrib.muon. Of one of optax, only args, the learning rate with its
    # schedule, and clip_norm count.
    config.optim.name = "adamw"
    config.optim.args = "{}"  # what else an optimizer of optax takes, as JSON
    config.optim.lr = 1e-3
    # How lr grows with the batch, from one of reference_batch: none | linear | sqrt
    config.optim.scale = "none"
    config.optim.reference_batch = 256
    # constant | linear | cosine | piecewise | slow_start | onecycle | cyclic |
    # warmup_stable_decay, or one of optax, such as optax.exponential_decay
    config.optim.schedule = "constant"
    config.optim.schedule_args = "{}"  # what one of optax takes, as JSON
    config.optim.warmup_updates = 0
    config.optim.start_fraction = 0.0  # the first learning rate, of the peak; 0: near 0
    config.optim.decay_updates = 0  # 0: all of config.updates
    config.optim.end_fraction = 0.01  # the last learning rate, of the peak
    # piecewise: the rate drops after so many updates; slow_start: it changes.
    config.optim.boundaries = ()
    config.optim.boundary_scale = 0.1  # what is left of the rate at each of them
    config.optim.fractions = (0.5, 0.075, 0.01, 0.001)  # slow_start: of the peak
    config.optim.peak_at = 0.3  # onecycle: where the peak lies, of all updates
    config.optim.peak_momentum = 0.85  # onecycle: momentum, or b1, at the peak
    config.optim.cycle_updates = 2000  # cyclic: from low to low
    config.optim.cooldown_updates = 100  # warmup_stable_decay: the last ones fall
    config.optim.momentum = 0.9
    config.optim.nesterov = True
    config.optim.b1 = 0.9
    config.optim.b2 = 0.95
    config.optim.eps = 1e-8  # of adamw and lamb
    config.optim.weight_decay = 0.0
    config.optim.decay_vectors = False  # also biases and the scales of norms
    config.optim.clip_norm = 0.0  # 0: no clipping
    config.optim.trust_coefficient = 0.001  # lars: of the ratio of norms
    config.optim.trust_clip = 10.0  # lamb: the largest norm of an array that counts
    # rmsprop_warmup: half of a step is SGD's after so many; 10 epochs in the paper.
    config.optim.transition_updates = 1000

    config.model = ConfigDict()

    config.precision = ConfigDict()
    config.precision.compute = "float32"  # float32 | bfloat16 | float16
    # What parameters are stored in, between updates; the optimizer computes in float32.
    config.precision.params = "float32"  # float32 | bfloat16 | float16
    # In which type devices sum gradients: auto | float32 | bfloat16 | float16; auto:
    # the one that XLA sums them in, which may be precision.compute.
    config.precision.reduce = "auto"
    # The loss is multiplied by it, and the gradient divided; an update whose gradient
    # is not finite is skipped: none | static | dynamic
    config.precision.loss_scale = "none"
    config.precision.init = 32768.0  # the first scale, or the static one
    # Dynamic: it doubles with the update after so many that were not skipped in a row.
    config.precision.growth = 2000
    config.precision.min_scale = 1.0  # dynamic: an overflow there ends the run

    config.data = ConfigDict()
    config.data.source = ""
    config.data.pipeline = "grain"  # grain | tfdata: what runs the stages
    config.data.workers = 0  # processes; 0 reads and decodes in threads
    config.data.threads = auto_field(1)  # concurrent reads; or auto, to be measured
    config.data.prefetch = 4  # batches made ahead of the trainer
    config.data.eval_examples = 0  # 0: the whole evaluation split
    # A wait for data that is longer ends the run, saved; 0: it may take for ever.
    config.data.timeout_s = 1800.0
    # Fresh items with a NaN or infinity: looked for where they enter the echo, and so
    # many skipped, each for the item of its place in a later epoch. 0: the first ends
    # the run.
    config.data.check_finite = True
    config.data.max_bad = 0
    config.data.hold_batch = False  # train on one batch only: the ceiling of speed
    config.data.storage = ConfigDict()
    config.data.storage.latency_s = 0.0  # mean time until a read answers
    config.data.storage.bytes_per_s = 0.0  # 0: unlimited
    config.data.storage.distribution = "constant"  # constant | exponential | bursty

    config.batch = ConfigDict()
    config.batch.micro = 1  # parts that each device computes one after the other
    # The batch grows after so many updates, so many times, up to batch_size.
    config.batch.boundaries = ()
    config.batch.factors = ()
    # Whose examples batch norm takes its statistics of: all | device. Those of an
    # update, or with micro above 1 of a part of it. Replicas take their own.
    config.batch.statistics = "all"
    # What it evaluates with: moving (averages over updates) | last (those of the last
    # update) | recompute (those of so many fresh batches, at every evaluation)
    config.batch.norm = "moving"
    config.batch.norm_batches = 16

    # Replicas with parameters of their own, one on each device, that meet now and then.
    config.local = ConfigDict()
    # After which updates: none (one model) | every (so many) | bernoulli (with
    # probability p) | load (that load fresh data, by the coin of a stochastic echo) |
    # cosine | linear | multistep (with a probability from p to p_end over the run)
    config.local.schedule = "none"
    config.local.every = 1
    config.local.p = 1.0
    config.local.p_end = 1.0
    config.local.start_after = 0  # updates each of which is followed by a meeting
    # What they go on from: mean | nesterov (DiLoCo: a step from where they met last)
    config.local.outer = "mean"
    config.local.outer_lr = 0.7
    config.local.outer_momentum = 0.9
    # Without replicas: simulated asynchronous SGD, which applies gradients so many
    # updates late.
    config.local.staleness = 0

    config.dispatch = ConfigDict()
    config.dispatch.mode = "auto"  # auto | loop | unroll | scan
    config.dispatch.steps = 0  # updates for each dispatch; 0: chosen, at most 8

    # Of the data; 0: one for each process. As many processes as divide them resume it.
    config.data.shards = 0

    config.distributed = ConfigDict()
    config.distributed.detect = True  # find other processes as jax does
    config.distributed.coordinator = ""  # HOST:PORT of the first process
    config.distributed.num_processes = 1
    config.distributed.process_id = 0

    config.profile = ConfigDict()
    # Traced with jax's profiler, into WORKDIR/profile; 0: none.
    config.profile.updates = 0
    config.profile.start = 20  # updates before them, which warm up

    config.xla = ConfigDict()
    # How gradients are summed over GPUs or TPUs: default | fuse | overlap | serial
    config.xla.preset = "default"
    config.xla.options = "{}"  # of the compiled update, as JSON

    config.mesh = ConfigDict()
    config.mesh.data = -1  # -1: all devices that fsdp leaves
    config.mesh.fsdp = 1
    return config.lock()


def load_config(name: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Loads a config file, as ``--config`` does on the command line.

    Args:
      name: ``"PATH.py"`` or ``"PATH.py:VARIANT"``, or the name of a config that comes
        with the package, such as ``"lm"`` or ``"sweeps/s1_placement:tiny"``. The file
        defines ``get_config(variant)``; without a variant it is called without
        arguments.
      overrides: What differs: nested (``{"echo": {"factor": 2.0}}``), by dotted
        names (``{"echo.factor": 2.0}``), or both. What the file sets and does not
        apply to them is left out, which is said on standard error: ``optim.clip_norm``
        with ``{"optim.name": "lars"}``.

    Returns:
      The config, locked. It may be of a study; `check_config` is for training.

    Raises:
      FileNotFoundError: There is no such file.
      OSError: It cannot be read.
      AttributeError: The file defines no ``get_config``, or an override names a
        field that the config does not have.
      TypeError: An override is of another type than the field.
      ValueError: The file fails, or makes no config.

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
    """Refuses a variant where a config takes none, and none where it needs one."""
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
      config: Is changed.
      overrides: See `load_config`.
      prefix: Stands before the names in what is said of them.

    Raises:
      AttributeError: There is no such field.
      TypeError: The value is of another type than the field.
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
                raise  # A field of ours, which says what it takes.
            raise TypeError(
                f"config.{prefix}{field}={value!r} is no {kind.__name__}, and the "
                f"field holds one: {config[field]!r}"
            ) from error
