"""The groups of fields of a training, except the echo and the optimizer."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from echo_jax.config.group import (
    Amount,
    Count,
    Group,
    Momentum,
    Natural,
    Positive,
    Precision,
    field_of,
)
from echo_jax.data.pipeline.spec import Engine
from echo_jax.data.pipeline.storage import StorageSpec
from echo_jax.echo.schedule import FetchSchedule

CHANGING = ("cosine", "linear", "multistep")
"""``local.sync_schedule``: the probability of a meeting changes over the run."""

MEETING = ("every", "bernoulli", "fetch", *CHANGING)
"""``local.sync_schedule``: replicas meet."""

Schedule = Literal[
    "none", "every", "bernoulli", "fetch", "cosine", "linear", "multistep"
]


@dataclass(frozen=True)
class DataSpec(Group):
    """The data, and the pipeline that reads it."""

    source: str = ""  # a prepared folder, tfds:NAME, hf:NAME, wds:FILES, or another
    pipeline: Engine = "grain"  # the library that runs the stages
    workers: Natural = 0  # processes; 0: threads read and decode
    threads: Natural = 1  # concurrent reads
    prefetch: Natural = 4  # batches made ahead of the trainer
    eval_examples: Natural = 0  # 0: the whole evaluation split
    # A longer wait for data saves and ends the run; 0: no limit.
    timeout_s: Amount = 1800.0
    # Whether to look for NaN and infinity in fresh items that enter the echo. The first
    # such item ends the run.
    check_finite: bool = True
    storage: StorageSpec = field(default_factory=StorageSpec)
    # Data shards; 0: one for each process. Any number of processes that divides the
    # shards can resume the run.
    shards: Natural = 0


@dataclass(frozen=True)
class PrecisionSpec(Group):
    """The types of numbers, and the scale of the loss."""

    compute: Precision = "float32"  # the type of activations and gradients
    # The type of stored parameters between updates; the optimizer computes in float32.
    params: Precision = "float32"
    # The type in which devices sum gradients. auto: the choice of XLA, which may be
    # precision.compute.
    reduce: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # The loss is multiplied by a scale and the gradient divided by it. An update whose
    # gradient is not finite is skipped.
    loss_scale: Literal["none", "static", "dynamic"] = "none"
    init: Positive = 32768.0  # the first scale, or the static one
    # Dynamic: the scale doubles after this number of updates without a skip in a row.
    growth: Count = 2000
    min_scale: Positive = 1.0  # dynamic: an overflow there ends the run

    def __post_init__(self):
        super().__post_init__()
        if self.loss_scale == "dynamic" and self.init < self.min_scale:
            rule = f"must be at least config.precision.min_scale={self.min_scale}"
            self.refuse("init", rule, self.min_scale)


@dataclass(frozen=True)
class LogSpec(Group):
    """Logs in addition to those of the run folder."""

    to: tuple[str, ...] = ()  # tensorboard, wandb; both write into WORKDIR


@dataclass(frozen=True)
class DispatchSpec(Group):
    """How updates are sent to the devices."""

    steps: Count = 1  # updates in one program, by lax.scan


@dataclass(frozen=True)
class DistributedSpec(Group):
    """The processes of a training."""

    detect: bool = True  # find other processes as jax does
    coordinator: str = ""  # HOST:PORT of the first process
    num_processes: Count = 1  # all of them
    process_id: Natural = 0  # this one

    def __post_init__(self):
        super().__post_init__()
        if self.process_id >= self.num_processes:
            rule = (
                f"must be below config.distributed.num_processes={self.num_processes}"
            )
            self.refuse("process_id", rule, 0)
        if not self.coordinator and self.num_processes > 1:
            rule = "needs --config.distributed.coordinator=HOST:PORT"
            self.refuse("num_processes", rule, 1)


@dataclass(frozen=True)
class ProfileSpec(Group):
    """A trace of some updates."""

    # Updates traced with jax's profiler, into WORKDIR/profile; 0: none.
    updates: Natural = 0
    start: Natural = 20  # warm-up updates before the trace


@dataclass(frozen=True)
class XlaSpec(Group):
    """Options of the compiler."""

    # The sum of gradients over GPUs or TPUs.
    preset: Literal["default", "fuse", "overlap", "serial"] = "default"
    options: str = "{}"  # options of the compiled update, as JSON


@dataclass(frozen=True)
class MeshSpec(Group):
    """The mesh of devices."""

    data: int = -1  # copies of the parameters; -1: all devices / fsdp
    fsdp: Count = 1  # devices that share a copy

    def __post_init__(self):
        super().__post_init__()
        if self.data != -1 and self.data < 1:
            self.refuse("data", "must be at least 1, or -1 for all devices", -1)


@dataclass(frozen=True)
class BatchSpec(Group):
    """The batch of an update; it may grow during training (Smith et al. 2018).

    A smaller batch is a part of one of the config's batches. Data and echo do not
    change; several updates use the parts of a batch.
    """

    accumulation_steps: Count = 1  # gradient accumulation: parts on each device
    # Updates after which the batch grows by each of the factors, up to batch_size.
    boundaries: tuple[int, ...] = ()
    # How many times as large the batch is after each of the boundaries.
    factors: tuple[int, ...] = ()
    # The devices whose examples give the statistics of batch norm. They are of an
    # update or, with accumulation_steps above 1, of a part of it. Replicas have their
    # own.
    statistics: Literal["all", "device"] = "all"
    # The batch norm statistics in evaluation: moving (averages over updates) | last (of
    # the last update) | recompute (of norm_batches fresh batches, each time)
    norm: Literal["moving", "last", "recompute"] = "moving"
    norm_batches: Count = 16  # fresh batches for norm=recompute

    def __post_init__(self):
        super().__post_init__()
        ends, factors = self.boundaries, self.factors
        are_updates = all(type(each) is int and 0 < each < 2**31 for each in ends)
        if not are_updates or any(a >= b for a, b in itertools.pairwise(ends)):
            rule = "must be numbers of updates, each above the one before"
            fix = tuple(sorted({*ends})) if are_updates else ()
            self.refuse("boundaries", rule, fix)
        is_whole = all(type(each) is int and each > 1 for each in factors)
        if len(factors) != len(ends) or not is_whole:
            rule = f"must be {len(ends)} whole numbers above 1, one for each boundary"
            self.refuse("factors", rule, (2,) * len(ends))
        if split := self.first_split():
            rule = f"has {split[0]}, where a batch of batch_size is not used up"
            fix = tuple(split[1] if each == split[0] else each for each in ends)
            self.refuse("boundaries", rule, fix)

    def parts(self, update: int) -> int:
        """Returns the number of parts of a batch after `update` updates."""
        return math.prod(
            factor for boundary, factor in self.steps() if update < boundary
        )

    def steps(self) -> list[tuple[int, int]]:
        """Returns each boundary with its factor."""
        return list(zip(self.boundaries, self.factors, strict=True))

    def number(self, update: int) -> int:
        """Returns the part of a batch that an update uses; see `parts`."""
        begun = max((b for b in self.boundaries if b <= update), default=0)
        return (update - begun) % self.parts(update)

    def first_split(self) -> tuple[int, int] | None:
        """Returns the first boundary within a batch and the next valid one, or None."""
        begun = 0
        for boundary in self.boundaries:
            parts = self.parts(boundary - 1)
            if left := (boundary - begun) % parts:
                return boundary, boundary + parts - left
            begun = boundary
        return None


@dataclass(frozen=True)
class LocalSpec(Group):
    """Replicas, one on each device, with their own parameters."""

    # When replicas synchronise: none (one model) | every (`sync_every` updates) |
    # bernoulli (with probability sync_p) | fetch (after updates that fetch fresh data
    # in a stochastic echo) | cosine | linear | multistep (with a probability from
    # sync_p to sync_p_end)
    sync_schedule: Schedule = "none"
    sync_every: Count = 1  # updates between synchronisations
    sync_p: float = 1.0  # their probability
    sync_p_end: float = 1.0  # the last one
    start_after: Natural = 0  # initial updates that all synchronise
    # The common parameters: mean | nesterov (DiLoCo: a step from the last common ones)
    outer: Literal["mean", "nesterov"] = "mean"
    outer_lr: Amount = 0.7  # the step's learning rate
    outer_momentum: Momentum = 0.9  # the step's momentum
    # Without replicas: the delay of gradients, in updates, of simulated asynchronous
    # SGD.
    staleness: Natural = 0

    def __post_init__(self):
        super().__post_init__()
        for name in ("sync_p", "sync_p_end"):
            if not 0 < self[name] <= 1:
                self.refuse(name, "must be a probability, in (0, 1]", 1.0)

    def meeting_schedule(self, updates: int) -> FetchSchedule:
        """Returns the probability by which replicas synchronise in so many updates."""
        p, schedule = self.sync_p, self.sync_schedule
        if schedule == "bernoulli":
            return FetchSchedule("p", "constant", p, p)
        return FetchSchedule("p", schedule, p, self.sync_p_end, updates)  # pyright: ignore[reportArgumentType]


def broken_rules(run: Any) -> Iterator[tuple[str, str, Any]]:
    """Yields each field that breaks a rule of local updates, the rule, and a fix."""
    if run.local.sync_schedule == "none":
        return
    if run.local.sync_schedule == "fetch" and run.echo.mode != "stochastic":
        rule = "meets where fresh data is loaded; it needs config.echo.mode=stochastic"
        yield "local.sync_schedule", rule, "every"
    shares = "delays gradients that devices share, and replicas share none"
    of_one = "is of one model, and the mean of replicas has seen no batch"
    kind = "is the type of gradients that devices share, and replicas share none"
    for name, usual, rule in (
        ("local.staleness", 0, shares),
        ("mesh.fsdp", 1, "needs one copy of the parameters, not replicas"),
        ("batch.boundaries", (), "is for one model, not replicas"),
        (
            "batch.accumulation_steps",
            1,
            "is for gradients that devices share, not replicas",
        ),
        ("precision.loss_scale", "none", "is of one model, not replicas"),
        ("precision.reduce", "auto", kind),
    ):
        if field_of(run, name) != usual:
            yield name, rule, usual
    if run.batch.norm == "last":
        yield "batch.norm", of_one, "recompute"
