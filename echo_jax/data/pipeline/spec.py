"""Settings of a training pipeline, and its random streams."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from echo_jax.data.pipeline.storage import StorageSpec
from echo_jax.echo.keys import seed_for_use

EchoAfter = Literal["read", "decode", "augment", "batch"]
Engine = Literal["grain", "tfdata"]

# The independent random streams of one seed.
SHUFFLE, AUGMENT, STORAGE = range(3)


@dataclass(frozen=True)
class PipelineSpec:
    """Settings of a training pipeline."""

    after: EchoAfter  # The stage that the echo follows.
    batch_size: int
    seed: int = 0  # Decides shuffling, augmentation and simulated latencies.
    # Concurrent reads in each process; 0 reads in the thread that batches.
    threads: int = 1
    workers: int = 0  # Processes that run the stages above the echo; 0 for none.
    prefetch: int = 4  # Batches made ahead of the trainer; 0 makes them on request.
    storage: StorageSpec = field(default_factory=StorageSpec)
    engine: Engine = "grain"
    check_finite: bool = True

    def __post_init__(self):
        for name, value, known in (
            ("echo.after", self.after, get_args(EchoAfter)),
            ("data.pipeline", self.engine, get_args(Engine)),
        ):
            if value not in known:
                raise ValueError(
                    f"{name}={value!r} is unknown; use one of {', '.join(known)}."
                )
        if self.engine == "tfdata" and self.workers:
            raise ValueError(
                f"data.workers={self.workers} needs data.pipeline=grain; tf.data runs "
                "the stages in threads. Use --config.data.workers=0."
            )
        for name in ("batch_size", "seed", "threads", "workers", "prefetch"):
            value, least = getattr(self, name), int(name == "batch_size")
            if value < least:
                named = name if name in ("batch_size", "seed") else f"data.{name}"
                raise ValueError(f"{named}={value} is too small; use {least} or more.")

    @classmethod
    def from_config(cls, config: Any) -> "PipelineSpec":
        """Returns the spec of a training config."""
        return cls(
            after=config.echo.after,
            batch_size=config.batch_size,
            seed=config.seed,
            threads=config.data.threads,
            workers=config.data.workers,
            prefetch=config.data.prefetch,
            storage=StorageSpec(**config.data.storage),
            engine=config.data.pipeline,
            check_finite=config.data.check_finite,
        )

    def stream_seed(self, stream: int) -> int:
        """Returns the seed of ``SHUFFLE``, ``AUGMENT`` or ``STORAGE``."""
        return int(seed_for_use(self.seed, stream, 0))
