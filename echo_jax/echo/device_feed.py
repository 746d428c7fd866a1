"""The host side of a device echo: reads, sends ahead, and decides."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from echo_jax.echo.counts import Counts
from echo_jax.echo.echo import Tags
from echo_jax.echo.keys import use_seed
from echo_jax.echo.plans.draws import Draw, DrawPlan, Need, stacked
from echo_jax.echo.reader import ChunkReader
from echo_jax.echo.stores.device import DrawInput, EchoBuffer, jitted_write

__all__ = ["DeviceFeed", "largest_buffer"]


class DeviceFeed:
    """The host side of a device echo: reads, sends ahead, and decides.

    Attributes:
      buffer: The layout.
      arrays: The slots. The caller passes them to its jitted function, which may
        take them away, and puts back what it returns. `next` may replace them too,
        so they are read after it.
      tags: The tags of the latest draws, ``int64[K, B]`` and ``int32[K, B]``.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        draws: DrawPlan,
        buffer: EchoBuffer,
        *,
        seed: int = 0,
        prefetch: int = 2,
    ):
        """Allocates the buffer; reads nothing yet.

        Args:
          iterable: Host batches of one size, with a leading axis. What it has
            yielded it must not write to again. With ``get_state`` and ``set_state``
            on its iterator the feed has them too.
          draws: Decides.
          buffer: Laid out for these batches and draws.
          seed: Of the keys of uses.
          prefetch: Chunks that are read and sent ahead by a thread; 0 reads when a
            draw needs it.

        Raises:
          ValueError: The buffer does not fit.
        """
        self.buffer = buffer
        self.arrays = buffer.init()
        self.tags: Tags | None = None
        self._draws = draws
        self._seed = seed
        self._reader = ChunkReader(iter(iterable), buffer.put, depth=prefetch)
        self._write = jitted_write(buffer)
        # The latest chunk, which stands in where nothing fresh is taken.
        self._chunk: Any = None

    @property
    def counts(self) -> Counts:
        """Fresh items taken, uses and repeats drawn."""
        return self._draws.counts

    def next(self, num_draws: int = 1) -> DrawInput | None:
        """Decides the next draws, and waits for what they need.

        Args:
          num_draws: K. A stream that ends within K > 1 draws drops their rest.

        Returns:
          The input of the jitted function, None at the end of the stream. At the end
          of a stream a draw may be shorter than a batch, as its `tags` are; its
          ``read_slots`` are then filled up with slot 0.
        """
        write_slots = self._take(num_draws)
        draws = [self._draws.draw() for _ in range(num_draws)]
        if any(draw is None for draw in draws):
            return None
        if write_slots is None:
            write_slots = self._nowhere
        return self._input(write_slots, [draw for draw in draws if draw is not None])

    def _take(self, num_draws: int) -> np.ndarray | None:
        """Takes the chunks that draws need.

        Returns:
          The slots of the last one, which is not written yet; None without any.
        """
        slots = None
        while (need := self._draws.need(num_draws)) is not Need.NO:
            if need is Need.MAY and (slots is not None or not self._reader.is_ready()):
                break
            chunk = self._reader.take()
            if chunk is None:
                self._draws.end()
                continue
            if slots is not None:
                self.arrays = self._write(self.arrays, self._chunk, slots)
            self._chunk, slots = chunk, self._draws.write()
            self._reader.forget(self._draws.first_chunk)
        return slots

    @functools.cached_property
    def _nowhere(self) -> np.ndarray:
        """Slots that are out of range, for a chunk that is not written again."""
        rows = len(jax.tree.leaves(self._chunk)[0])
        shape = (self.buffer.num_lanes, rows // self.buffer.num_lanes)
        return np.full(shape, self.buffer.num_slots, np.int32)

    def _input(self, write_slots: np.ndarray, draws: list[Draw]) -> DrawInput:
        index, repeat, reads = (
            stacked([getattr(draw, name) for draw in draws])
            for name in ("fresh_index", "repeat", "read_slots")
        )
        rows = (len(draws), -1)
        self.tags = Tags(index.reshape(rows), repeat.reshape(rows))
        seeds = use_seed(self._seed, *self.tags)
        return DrawInput(
            self._chunk,
            write_slots,
            reads.astype(np.int32, copy=False),
            self.tags.repeat,
            seeds.view(np.uint32).reshape(*seeds.shape, 2),
        )

    def get_state(self) -> dict[str, Any]:
        """Returns the state before the next draw.

        Raises:
          TypeError: If the upstream has no get_state and set_state.
        """
        first = self._draws.first_chunk
        return {
            "draws": self._draws.get_state(),
            "upstream": self._reader.state_before(first),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues as the feed that gave the state would have.

        What the buffer held is read from the upstream again.

        Raises:
          ValueError: If the state is not one of a feed, or if the upstream no longer
            has the items that it had.
        """
        if set(state) != {"draws", "upstream"}:
            raise ValueError(
                f"a state with the keys {sorted(state)} is not one of a device feed; "
                "give what get_state returned"
            )
        held = self._draws.set_state(state["draws"])
        self._reader.restore(state["upstream"], self._draws.first_chunk)
        for number, slots in held:
            chunk = self._reader.take()
            if chunk is None:
                raise ValueError(
                    f"the upstream ended before chunk {number}, which the state needs; "
                    "restore it over the same data"
                )
            self._chunk = chunk
            self.arrays = self._write(self.arrays, chunk, slots)

    def close(self) -> None:
        """Stops reading ahead."""
        self._reader.close()


def largest_buffer(
    make_draws: Callable[[int], DrawPlan], num_items: int, num_lanes: int
) -> int:
    """Returns the largest buffer that some memory holds.

    Args:
      make_draws: Makes the draws of a buffer of so many items.
      num_items: Items that fit into the memory, over all lanes.
      num_lanes: Lanes.

    Returns:
      A buffer in items; with it the draws need at most ``num_items`` slots.

    Raises:
      ValueError: The memory is too small for any.
    """
    # What draws need beyond their buffer grows with it.
    needed = make_draws(max(num_items, num_lanes)).num_slots * num_lanes
    buffer = (2 * num_items - needed) // num_lanes * num_lanes
    if buffer < num_lanes:
        raise ValueError(
            f"the memory holds {num_items} items, and the echo needs {needed} "
            "besides its buffer; use more buffer_bytes, or smaller batches"
        )
    return buffer
