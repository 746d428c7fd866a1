"""The smaller groups of fields of a training."""

from dataclasses import dataclass, field
from typing import Literal

from echo_jax.config.group import Amount, Count, Group, Natural, Positive, Precision
from echo_jax.data.pipeline.spec import Engine
from echo_jax.data.pipeline.storage import StorageSpec


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
