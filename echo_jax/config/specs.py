"""The groups of fields of a training, except the echo and the optimizer."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from echo_jax.config.group import (
    Amount,
    Boundaries,
    Bounds,
    Count,
    Group,
    Natural,
    Positive,
    Precision,
    Probability,
    Share,
)
from echo_jax.data.pipeline.spec import Engine
from echo_jax.data.pipeline.storage import StorageSpec
from echo_jax.echo.schedule import FetchSchedule

CHANGING = ("cosine", "linear", "multistep")
"""Values of ``local.sync_schedule`` with a probability that changes over the run."""

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
    # A longer wait for data ends the run, without a save; 0: no limit.
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
            rule = f"must be below num_processes={self.num_processes}"
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


@dataclass(frozen=True)
class BatchSpec(Group):
    """The batch of an update; it may grow during training (Smith et al. 2018).

    A smaller batch is a part of one of the config's batches. Data and echo do not
    change; several updates use the parts of a batch.
    """

    accumulation_steps: Count = 1  # gradient accumulation: parts on each device
    # Updates after which the batch grows by each of the factors, up to batch_size.
    boundaries: Boundaries = ()
    # How many times as large the batch is after each of the boundaries.
    factors: Annotated[tuple[int, ...], Bounds(2)] = ()
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
        ends = self.boundaries
        if any(a >= b for a, b in itertools.pairwise(ends)):
            rule = "must be numbers of updates, each above the one before"
            self.refuse("boundaries", rule, tuple(sorted({*ends})))
        if len(self.factors) != len(ends):
            rule = f"must be {len(ends)} factors, one for each boundary"
            self.refuse("factors", rule, (2,) * len(ends))
        for end in ends:
            if left := self.parts(end - 1) - 1 - self.number(end - 1):
                rule = f"has {end}, where a batch of batch_size is not used up"
                fix = tuple(end + left if each == end else each for each in ends)
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


@dataclass(frozen=True)
class LocalSpec(Group):
    """Replicas, one on each device, with their own parameters."""

    # When replicas synchronise: none (one model) | every (`sync_every` updates) |
    # bernoulli (with probability sync_p) | fetch (after updates that fetch fresh data
    # in a stochastic echo) | cosine | linear | multistep (with a probability from
    # sync_p to sync_p_end)
    sync_schedule: Schedule = "none"
    sync_every: Count = 1  # updates between synchronisations
    sync_p: Probability = 1.0  # their probability
    sync_p_end: Probability = 1.0  # the last one
    start_after: Natural = 0  # initial updates that all synchronise
    # The common parameters: mean | nesterov (DiLoCo: a step from the last common ones)
    outer: Literal["mean", "nesterov"] = "mean"
    outer_lr: Amount = 0.7  # the step's learning rate
    outer_momentum: Share = 0.9  # the step's momentum
    # Without replicas: the delay of gradients, in updates, of simulated asynchronous
    # SGD.
    staleness: Natural = 0

    def sync_probability(self, updates: int) -> FetchSchedule:
        """Returns the probability by which replicas synchronise in so many updates."""
        start, end = self.sync_p, self.sync_p_end
        if self.sync_schedule == "bernoulli":
            return FetchSchedule("p", "constant", start, start)
        return FetchSchedule("p", self.sync_schedule, start, end, updates)  # pyright: ignore[reportArgumentType]
