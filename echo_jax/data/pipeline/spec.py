"""How a training pipeline is run, and the random streams that it draws from."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from echo_jax.data.pipeline.storage import StorageSpec
from echo_jax.echo.keys import use_seed

__all__ = ["AUGMENT", "SHUFFLE", "STORAGE", "EchoAfter", "Engine", "PipelineSpec"]

EchoAfter = Literal["read", "decode", "augment", "batch"]
Engine = Literal["grain", "tfdata"]

# What a pipeline draws at random, as names of independent streams of one seed.
SHUFFLE, AUGMENT, STORAGE = range(3)


@dataclass(frozen=True)
class PipelineSpec:
    """How a training pipeline is run.

    Attributes:
      after: The stage that the echo follows.
      batch_size: Examples in a batch.
      seed: Decides shuffling, augmentation and simulated latencies.
      threads: Concurrent reads (in each worker process); 0 reads in the thread
        that makes the batches.
      workers: Processes that run the stages above the echo; 0 for none.
      prefetch: Batches made ahead of the trainer; 0 makes them when asked.
      storage: How long reads take.
      engine: What runs the stages: ``"grain"`` or ``"tfdata"``. The batches are
        the same.
      check_finite: Whether to look for NaN and infinity in fresh items, before
        their first use.
      max_bad: How many such items a run may skip, which the trainer counts; 0 refuses
        the first. See `echo_jax.data.pipeline.check_finite`.

    Raises:
      ValueError: If a field is out of its range.

    Example:
      >>> PipelineSpec(after="decode", batch_size=32).threads
      1
    """

    after: EchoAfter
    batch_size: int
    seed: int = 0
    threads: int = 1
    workers: int = 0
    prefetch: int = 4
    storage: StorageSpec = field(default_factory=StorageSpec)
    engine: Engine = "grain"
    check_finite: bool = True
    max_bad: int = 0

    def __post_init__(self):
        if self.after not in get_args(EchoAfter):
            raise ValueError(
                f"echo.after={self.after!r} is no stage; use one of "
                f"{', '.join(get_args(EchoAfter))}."
            )
        if self.engine not in get_args(Engine):
            raise ValueError(
                f"data.pipeline={self.engine!r} is unknown; use one of "
                f"{', '.join(get_args(Engine))}."
            )
        if self.engine == "tfdata" and self.workers:
            raise ValueError(
                f"data.workers={self.workers} needs data.pipeline=grain; tf.data runs "
                "the stages in threads. Use --config.data.workers=0."
            )
        bounds = {
            "batch_size": 1,
            "seed": 0,
            "data.threads": 0,
            "data.workers": 0,
            "data.prefetch": 0,
            "data.max_bad": 0,
        }
        for name, least in bounds.items():
            value = getattr(self, name.removeprefix("data."))
            if value < least:
                raise ValueError(f"{name}={value} is too small; use {least} or more.")
        if not self.max_bad:
            return
        if not self.check_finite:
            raise ValueError(
                f"data.max_bad={self.max_bad} needs --config.data.check_finite=True."
            )
        if self.after == "read":
            raise ValueError(
                f"data.max_bad={self.max_bad} has no items to skip with echo.after="
                "read, which echoes records before it is known what is in them; use "
                "--config.data.max_bad=0, or --config.echo.after=decode."
            )

    @classmethod
    def from_config(cls, config: Any) -> "PipelineSpec":
        """Returns what a training config says about its pipeline.

        Args:
          config: The fields of `echo_jax.config.default_config`. Where it leaves the
            threads open, there is one.
        """
        storage, threads = config.data.storage, config.data.threads
        return cls(
            after=config.echo.after,
            batch_size=config.batch_size,
            seed=config.seed,
            threads=1 if threads == "auto" else threads,
            workers=config.data.workers,
            prefetch=config.data.prefetch,
            storage=StorageSpec(
                storage.latency_s, storage.bytes_per_s, storage.distribution
            ),
            engine=config.data.pipeline,
            check_finite=config.data.check_finite,
            max_bad=config.data.max_bad,
        )

    @property
    def items_per_index(self) -> int:
        """Over how many fresh items the echo's fresh index counts once."""
        return self.batch_size if self.after == "batch" else 1

    def stream_seed(self, stream: int) -> int:
        """Returns the seed of ``SHUFFLE``, ``AUGMENT`` or ``STORAGE``."""
        return int(use_seed(self.seed, stream, 0))
