"""The store of an echo for `tf.data`: the graph keeps elements, an order says which.

The graph calls the host's order as a pure function of integers, once for each chunk of
fresh elements. So TensorFlow can checkpoint it like its own operations.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_jax.echo.counts import UseInfo
from echo_jax.echo.orders import Order, Piece, rounds_of
from echo_jax.echo.plans.fixed import FixedPlan
from echo_jax.echo.spec import EchoSpec

try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(
        "tf.data needs TensorFlow, which is not installed; run "
        "pip install 'echo-jax[tfdata]'"
    ) from error

__all__ = ["GraphEcho", "tf"]

_USES_AT_ONCE = 64
_COUNTS_AT_ONCE = 1024
_MOST_LIVE = 8
_PLACE = ("round", "anchor", "carry", "position")
_NONE = np.zeros(0, np.int64)
_NEW = {**dict.fromkeys(_PLACE, 0), "fresh": 0, "end": -1}


@dataclass
class GraphEcho:
    """The function that `echo` of `tfdata` returns, for an `EchoSpec`."""

    spec: EchoSpec
    batch: bool
    drop_remainder: bool
    tags: bool
    state: Mapping[str, int] | None

    def __post_init__(self):
        self._order, self._start = rounds_of(self.spec), self.state or _NEW
        if self.state:
            FixedPlan(self.spec).set_state(self.state)

    @tf.autograph.experimental.do_not_convert
    def __call__(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        if self._order.by_item:
            uses = self._back_to_back(dataset)
        else:
            packing, nothing = _Packing(dataset.element_spec), tf.constant(0)
            if not packing.is_needed:
                return self._in_chunks(dataset, self.batch, None)
            # A scan, because tf.data may make a map parallel, and so read ahead.
            packed = dataset.scan(nothing, lambda _, x: (nothing, packing.pack(x)))
            uses = self._in_chunks(packed, False, packing.unpack)
        size = self.spec.batch_size
        return uses.batch(size, self.drop_remainder) if self.batch else uses

    def _back_to_back(self, dataset: tf.data.Dataset) -> Any:
        """Returns all uses of an item before it reads the next one."""

        def count(first, carry):
            uses = self.spec.schedule.uses(int(first), _COUNTS_AT_ONCE, int(carry))
            return uses[0], np.int64(uses[1])

        def number(carry, first):
            inputs, types = [first, carry], [tf.int64, tf.int64]
            uses, after = tf.numpy_function(count, inputs, types, stateful=False)
            index = tf.range(first, first + _COUNTS_AT_ONCE)
            uses = tf.ensure_shape(uses, index.shape)
            return tf.ensure_shape(after, []), (index, uses)

        def repeat(item, numbers):
            index, uses = numbers
            items = tf.data.Dataset.from_tensors(item).repeat(uses)
            if not self.tags:
                return items
            indices = tf.data.Dataset.from_tensors(index).repeat(uses)
            repeats = tf.data.Dataset.range(uses, output_type=tf.int32)
            return tf.data.Dataset.zip((items, UseInfo(indices, repeats)))

        most = np.iinfo(np.int64).max - _COUNTS_AT_ONCE
        firsts = tf.data.Dataset.range(self._start["anchor"], most, _COUNTS_AT_ONCE)
        numbers: Any = firsts.scan(np.int64(self._start["carry"]), number)
        counted: Any = tf.data.Dataset.zip((dataset, numbers.unbatch()))
        return counted.flat_map(repeat).skip(self._start["position"])

    def _in_chunks(self, dataset: Any, batch: bool, unpack: Any) -> Any:
        """Returns the uses, or batches, that each chunk of fresh elements allows."""
        # Chunks double up to a buffer of uses: with smaller ones the elements that are
        # kept would be copied too often.
        most = math.ceil(self.spec.buffer / self.spec.schedule.max_factor)
        sizes = [min(self.spec.batch_size, most)]
        while sizes[-1] < most:
            sizes.append(min(sum(sizes), most))
        sizes = np.array(sizes, np.int64)
        starts = np.cumsum(sizes) - sizes
        walk = _Walk(self._order, self._start, self.spec.batch_size if batch else 1)

        def chunk_of(place, _):
            grown = tf.searchsorted(starts, [place], "right", tf.int64)[0] - 1
            return grown + tf.maximum(place - starts[-1], 0) // sizes[-1]

        def size_of(chunk):
            return tf.gather(sizes, tf.minimum(chunk, len(sizes) - 1))

        def advance(state, fresh):
            integers, held, items, kept = state
            places, fresh = fresh
            items = tf.nest.map_structure(
                lambda old, new: tf.concat([tf.gather(old, kept), new], 0), items, fresh
            )
            types = [tf.int64] * 5 + [tf.int32]
            inputs = [integers, held, tf.size(places, tf.int64)]
            outputs = tf.numpy_function(walk, inputs, types, stateful=False)
            for output in outputs:
                output.set_shape([None])
            integers, held, kept, *uses = outputs
            return (integers, held, items, kept), (items, tuple(uses))

        def emit(items, uses):
            def read(places, *tag):
                found = tf.nest.map_structure(
                    lambda leaf: tf.gather(leaf, places), items
                )
                return found, UseInfo(*tag)

            def finish(item, tag):
                item = unpack(item) if unpack else item
                return (item, tag) if self.tags else item

            # A call per use would take longer than everything else.
            size = self.spec.batch_size if batch else _USES_AT_ONCE
            parts: Any = tf.data.Dataset.from_tensor_slices(uses)
            parts = parts.batch(size, batch and self.drop_remainder)
            if unpack:
                return parts.map(read).unbatch().map(finish)
            parts = parts.map(lambda *use: finish(*read(*use)))
            return parts if batch else parts.unbatch()

        nothing = tf.nest.map_structure(
            lambda leaf: tf.zeros([0, *leaf.shape], leaf.dtype), dataset.element_spec
        )
        return (
            dataset.enumerate()
            .group_by_window(
                chunk_of,
                lambda chunk, elements: elements.batch(size_of(chunk)),
                window_size_func=size_of,
            )
            # A chunk without elements tells that the dataset has ended.
            .concatenate(tf.data.Dataset.from_tensors((_NONE, nothing)))
            .scan((walk.first, _NONE, nothing, _NONE), advance)
            .flat_map(emit)
        )


class _Packing:
    """Takes elements apart into tensors that stack, and puts them together."""

    # If the shape of a tensor is not fully known, as of an image before it is cropped,
    # the tensors become strings of bytes, so that elements of different shapes stack.
    # So do tensors without elements: TensorFlow 2.21 fails to unbatch their stack.

    def __init__(self, element_spec: Any):
        self._element_spec = element_spec
        self._specs = tf.nest.flatten(element_spec, expand_composites=True)
        if any(spec.dtype in (tf.variant, tf.resource) for spec in self._specs):
            raise TypeError(
                f"elements of {element_spec} hold datasets or other variants, which "
                "only order='consecutive' can repeat; echo before the stage that "
                "makes them, such as window()"
            )
        # Most elements stack as they are.
        self.is_needed = tf.nest.flatten(element_spec) != self._specs or not all(
            spec.shape.num_elements() for spec in self._specs
        )

    def pack(self, element: Any) -> tuple[tf.Tensor, ...]:
        tensors = tf.nest.flatten(element, expand_composites=True)
        return tuple(tf.io.serialize_tensor(t) for t in tensors if t is not None)

    def unpack(self, packed: tuple[tf.Tensor, ...]) -> Any:
        tensors = [
            tf.ensure_shape(tf.io.parse_tensor(tensor, spec.dtype), spec.shape)
            for tensor, spec in zip(packed, self._specs, strict=True)
        ]
        return tf.nest.pack_sequence_as(
            self._element_spec, tensors, expand_composites=True
        )


class _Walk:
    """An order as a pure function: integers before a chunk to those after it."""

    # The integers are the round, its anchor and carry, its number of uses so far, the
    # number of the next element, and the uses that wait for a whole batch. The fresh
    # indices of the kept elements ascend, as the elements do.

    def __init__(self, order: Order, start: Mapping[str, int], unit: int):
        # Uses leave in multiples of ``unit``, until the dataset ends.
        self._order, self._start, self._unit = order, start, unit
        place, first = [start[key] for key in _PLACE], start["anchor"]
        if start["end"] >= 0:
            # The position is among the uses of items that come.
            pieces = self._order.pieces(*place[:3])
            pieces = itertools.takewhile(lambda piece: piece.round == place[0], pieces)
            index = np.concatenate([piece.index for piece in pieces])
            come = np.cumsum(index < start["end"])
            place[3] = int(np.append(0, come).searchsorted(place[3]))
        self.first = np.array([*place, first])
        used, (pieces, piece, _, at) = [_NONE], self._begin(*place)
        while piece.anchor < start["fresh"]:
            used.append(piece.index[at:])
            piece, at = next(pieces), 0
        self._used_up = np.setdiff1d(
            np.arange(first, start["fresh"]), np.concatenate(used)
        )
        # What is at some integers, so that the next call need not make it again.
        self._live: dict[bytes, tuple[Iterator[Piece], Piece, int, int]] = {}

    def __call__(
        self, integers: np.ndarray, held: np.ndarray, count: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Returns integers, held indices, and places to keep; then a chunk's uses."""
        # The uses are places among the held and the fresh elements, indices, repeats.
        *place, came = integers[: self.first.size].tolist()
        items = np.concatenate([held, np.arange(came, came + count)])
        came += int(count)
        if not count and came < self._start["fresh"]:
            raise ValueError(
                f"the dataset ended before item {came}, and the state has used items "
                f"up to {self._start['fresh'] - 1}; give the dataset that the state "
                f"was saved with, from item {self._start['anchor']} on"
            )
        found = self._live.pop(integers.tobytes(), None) or self._begin(*place)
        pieces, piece, before, at = found
        uses = [integers[self.first.size :].reshape(3, -1)]
        while piece.anchor < came:
            ready = piece.newest.searchsorted(came) if count else piece.index.size
            stop = max(at, int(ready))
            columns = piece.index, piece.repeat, piece.last
            uses.append(np.stack([column[at:stop] for column in columns]))
            at = stop
            if at < piece.index.size:
                break
            done, piece, at = piece, next(pieces), 0
            before = before + done.index.size if done.round == piece.round else 0
        leaving = np.concatenate(uses, axis=1)
        leaving = leaving[:, leaving[0] < came]
        whole = leaving.shape[1] // self._unit * self._unit if count else None
        (index, repeat, last), waiting = leaving[:, :whole], leaving[:, whole:]
        places, keep = np.searchsorted(items, index), ~np.isin(items, self._used_up)
        keep[places[last > 0]] = False
        place = [piece.round, piece.anchor, piece.carry, before + at, came]
        integers = np.concatenate([place, waiting.reshape(-1)])
        if len(self._live) >= _MOST_LIVE:
            self._live.clear()
        self._live[integers.tobytes()] = pieces, piece, before, at
        kept = np.flatnonzero(keep)
        return integers, items[kept], kept, places, index, repeat.astype(np.int32)

    def _begin(
        self, round_: int, anchor: int, carry: int, position: int
    ) -> tuple[Iterator[Piece], Piece, int, int]:
        """Returns pieces, the one that holds a position, and the uses around it."""
        pieces, before = self._order.pieces(round_, anchor, carry), 0
        piece = next(pieces)
        while position - before > piece.index.size:
            before += piece.index.size
            piece = next(pieces)
        return pieces, piece, before, position - before
