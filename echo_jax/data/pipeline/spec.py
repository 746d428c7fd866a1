"""Settings of a training pipeline, and its random streams."""

from dataclasses import dataclass, field
from typing import Literal

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
        if self.engine == "tfdata" and self.workers:
            raise ValueError(
                f"data.workers={self.workers} needs data.pipeline=grain; tf.data runs "
                "the stages in threads. Use --config.data.workers=0."
            )

    def stream_seed(self, stream: int) -> int:
        """Returns the seed of ``SHUFFLE``, ``AUGMENT`` or ``STORAGE``."""
        return int(seed_for_use(self.seed, stream, 0))
