"""The feed of an echo on the devices: what a config makes of `echo_jax.echo.device`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from echo_jax.config import Config
from echo_jax.echo.adaptive import AdaptiveDraws
from echo_jax.echo.device import DeviceFeed, DrawInput, EchoBuffer, largest_buffer
from echo_jax.echo.draws import DrawPlan, FixedDraws
from echo_jax.echo.keys import use_seed
from echo_jax.echo.spec import EchoSpec
from echo_jax.echo.stochastic import LoadSchedule, StochasticDraws
from echo_jax.echo.tape import Tape
from echo_jax.training.sharding import replicated
from echo_jax.workloads.base import Augment, Batch

__all__ = ["DeviceDraw", "DeviceEchoFeed", "make_draws"]

# Apart from the seeds that the host's pipeline derives from the same seed.
_AUGMENT_STREAM = 1 << 20


def make_draws(
    config: Config, spec: EchoSpec, *, mesh: Mesh, max_draws: int = 1
) -> DrawPlan:
    """Returns the plan of an echo on the devices.

    Args:
      config: A checked training config with ``echo.where="device"``.
      spec: The echo over all devices; modes other than ``fixed`` take its buffer, its
        batch and its seed.
      mesh: The devices.
      max_draws: Updates in a dispatch at most.

    Raises:
      OSError: The tape to be replayed cannot be read.
      ValueError: The echo is impossible.
    """
    sizes: dict[str, Any] = {
        "chunk_items": config.batch_size,
        "num_lanes": _num_lanes(config, mesh),
    }
    if config.echo.mode == "fixed":
        return FixedDraws(spec, max_draws=max_draws, **sizes)
    sizes |= {
        "buffer": spec.buffer,
        "batch_size": spec.batch_size,
        "seed": spec.seed,
    }
    if config.echo.mode == "adaptive":
        return AdaptiveDraws(cap=config.echo.cap, replay=_replay(config), **sizes)
    load = LoadSchedule(**config.echo.load.to_dict())
    return StochasticDraws(load=load, max_draws=max_draws, **sizes)


def _num_lanes(config: Config, mesh: Mesh) -> int:
    lanes = config.echo.lanes or mesh.size
    if lanes % mesh.size:
        raise ValueError(
            f"config.echo.lanes={lanes} is not a multiple of the {mesh.size} devices "
            "of the mesh; set --config.echo.lanes=0 for one on each"
        )
    return lanes


def _replay(config: Config) -> Tape | None:
    """Returns the tape that the config asks to be repeated."""
    path = config.echo.replay
    if not path:
        return None
    try:
        return Tape.load(path)
    except FileNotFoundError:
        raise ValueError(
            f"there is no tape {path!r}; give the tape.json of an adaptive run to "
            "--config.echo.replay"
        ) from None


@dataclass(frozen=True)
class DeviceDraw:
    """Draws batches from the buffer, and augments them; see `feed.Draw`.

    Attributes:
      buffer: The layout.
      augment: What is done to every use; None for nothing.
    """

    buffer: EchoBuffer
    augment: Augment | None

    @property
    def arrays_sharding(self) -> NamedSharding:
        """See `feed.Draw`."""
        return self.buffer.sharding

    @property
    def input_sharding(self) -> DrawInput:
        """See `feed.Draw`; indices are small, and every device has all of them."""
        whole = replicated(self.buffer.mesh)
        return DrawInput(self.buffer.sharding, whole, whole, whole, whole)

    def __call__(self, arrays: Any, inputs: DrawInput) -> tuple[Any, list[Batch]]:
        """See `feed.Draw`."""
        arrays, batches = self.buffer.draw(arrays, inputs)
        if self.augment is not None:
            for k, batch in enumerate(batches):
                keys = jax.random.wrap_key_data(inputs.key_data[k], impl="threefry2x32")
                batches[k] = self.augment(batch, keys)
        return arrays, [
            {**batch, "repeat": inputs.repeat[k]} for k, batch in enumerate(batches)
        ]

    def send(self, inputs: DrawInput) -> DrawInput:
        """See `feed.Draw`: the chunk is on its way already."""
        return inputs


class DeviceEchoFeed:
    """Batches drawn from a buffer on the devices; see `feed.Feed`.

    Attributes:
      draw: See `feed.Feed`.
      tape: The decisions so far of an adaptive echo; None in other modes.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        config: Config,
        spec: EchoSpec,
        *,
        mesh: Mesh,
        sample: Batch,
        augment: Augment | None = None,
        max_draws: int = 1,
        note: Callable[[str], None] = lambda line: None,
    ):
        """Lays out the buffer and allocates it; reads nothing yet.

        Args:
          batches: Fresh host batches. Their iterator must have ``get_state`` and
            ``set_state`` if those of the feed are used.
          config: A checked training config with ``echo.where="device"``.
          spec: See `make_draws`.
          mesh: The devices.
          sample: A batch like those; its examples decide the layout.
          augment: What is done to every use; None for nothing.
          max_draws: The most updates that `take` is asked for.
          note: Is told the size of the buffer before it is allocated.

        Raises:
          ValueError: The echo is impossible, or the buffer does not fit.
        """
        make = partial(make_draws, config, mesh=mesh, max_draws=max_draws)
        lanes = _num_lanes(config, mesh)
        layout = EchoBuffer.of(sample, num_slots=1, num_lanes=lanes, mesh=mesh)
        if config.echo.buffer_bytes:
            fits = config.echo.buffer_bytes // layout.bytes_per_item
            spec = replace(
                spec,
                buffer=largest_buffer(
                    lambda items: make(replace(spec, buffer=items)), fits, lanes
                ),
            )
        draws = make(spec)
        buffer = replace(layout, num_slots=draws.num_slots)
        note(str(buffer))
        self._seed = int(use_seed(config.seed, _AUGMENT_STREAM, 0))
        self._sample = sample
        self._iterator = iter(batches)
        self._feed = DeviceFeed(
            self._iterator,
            draws,
            buffer,
            seed=self._seed,
            prefetch=config.data.prefetch,
        )
        self.draw = DeviceDraw(buffer, augment)
        self._draws = draws
        self._held: dict[int, DrawInput] = {}

    @property
    def arrays(self) -> Any:
        """See `feed.Feed`: the slots."""
        return self._feed.arrays

    @arrays.setter
    def arrays(self, arrays: Any) -> None:
        self._feed.arrays = arrays

    @property
    def tape(self) -> Tape | None:
        """See the class."""
        return self._draws.tape if isinstance(self._draws, AdaptiveDraws) else None

    def take(self, num_updates: int) -> DrawInput | None:
        """See `feed.Feed`."""
        self._held.clear()  # Gives the sample's memory back.
        return self._feed.next(num_updates)

    def hold(self, num_updates: int) -> DrawInput:
        """See `feed.Feed`: the sample, written and read at every update."""
        if num_updates not in self._held:
            self._held[num_updates] = self._sample_input(num_updates)
        return self._held[num_updates]

    def _sample_input(self, num_updates: int) -> DrawInput:
        buffer = self.draw.buffer
        rows = len(jax.tree.leaves(self._sample)[0])
        shape = (buffer.num_lanes, rows // buffer.num_lanes)
        slots = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
        repeat = np.zeros(rows, np.int32)
        seeds = use_seed(self._seed, np.arange(rows), repeat)
        each = (slots, repeat, seeds.view(np.uint32).reshape(rows, 2))
        reads, repeat, keys = (np.stack([x] * num_updates) for x in each)
        return DrawInput(buffer.put(self._sample), slots, reads, repeat, keys)

    def get_state(self) -> dict[str, Any]:
        """See `feed.Feed`."""
        return self._feed.get_state()

    def set_state(self, state: Any) -> None:
        """See `feed.Feed`."""
        self._feed.set_state(state)

    def close(self) -> None:
        """See `feed.Feed`."""
        self._feed.close()
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()
