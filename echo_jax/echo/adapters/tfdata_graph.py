"""The store of an echo for `tf.data`: the graph keeps elements, an order says which.

The graph calls the host's order as a pure function of integers, once for each chunk of
fresh elements. So TensorFlow can checkpoint it like its own operations.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from echo_jax.echo.adapters.tensorflow_extra import tf
from echo_jax.echo.counts import UseInfo
from echo_jax.echo.orders import Piece, rounds_of
from echo_jax.echo.orders.consecutive import Consecutive
from echo_jax.echo.plans.fixed import FixedPlan
from echo_jax.echo.spec import EchoSpec

__all__ = ["graph_echo"]

_USES_AT_ONCE = 64
_COUNTS_AT_ONCE = 1024
_MOST_LIVE = 8
_PLACE = ("round", "anchor", "carry", "position")
_NONE = np.zeros(0, np.int64)


def graph_echo(
    spec: EchoSpec,
    *,
    batch: bool,
    drop_remainder: bool,
    tags: bool,
    state: Mapping[str, int] | None,
) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    """Returns the function that `echo` of `tfdata` returns, for a checked spec."""
    is_consecutive = isinstance(rounds_of(spec), Consecutive)
    if state:
        FixedPlan(spec).check_state(state)
    start = state or {**dict.fromkeys(_PLACE, 0), "fresh": 0, "end": -1}

    @tf.autograph.experimental.do_not_convert
    def apply(dataset: tf.data.Dataset) -> tf.data.Dataset:
        if not is_consecutive:
            return _in_chunks(dataset, spec, start, tags, batch, drop_remainder)
        uses = _back_to_back(dataset, spec, start, tags)
        return uses.batch(spec.batch_size, drop_remainder) if batch else uses

    return apply


def _back_to_back(
    dataset: tf.data.Dataset, spec: EchoSpec, start: Mapping[str, int], tags: bool
) -> tf.data.Dataset:
    """Returns all uses of an item before it reads the next one."""

    def count(first, carry):
        uses, carry = spec.schedule.uses(int(first), _COUNTS_AT_ONCE, int(carry))
        return uses, np.int64(carry)

    def number(carry, first):
        uses, after = tf.numpy_function(
            count, [first, carry], [tf.int64, tf.int64], stateful=False
        )
        index = tf.range(first, first + _COUNTS_AT_ONCE)
        return tf.ensure_shape(after, []), (index, tf.ensure_shape(uses, index.shape))

    def repeat(item, numbers):
        index, uses = numbers
        items = tf.data.Dataset.from_tensors(item).repeat(uses)
        if not tags:
            return items
        indices = tf.data.Dataset.from_tensors(index).repeat(uses)
        repeats = tf.data.Dataset.range(uses, output_type=tf.int32)
        return tf.data.Dataset.zip((items, UseInfo(indices, repeats)))

    most = np.iinfo(np.int64).max - _COUNTS_AT_ONCE
    firsts: Any = tf.data.Dataset.range(start["anchor"], most, _COUNTS_AT_ONCE)
    numbers = firsts.scan(np.int64(start["carry"]), number).unbatch()
    counted: Any = tf.data.Dataset.zip((dataset, numbers))
    uses = counted.flat_map(repeat)
    return uses.skip(start["position"]) if start["position"] else uses


class _Packing:
    """Takes elements apart into tensors that stack, and puts them together."""

    # A tensor whose shape is not fully known, such as an image before it is cropped,
    # becomes a string of bytes, so that elements of different shapes stack. So does a
    # tensor without elements: TensorFlow 2.21 fails to unbatch its stack.

    def __init__(self, element_spec: Any):
        self._element_spec = element_spec
        self._specs = tf.nest.flatten(element_spec, expand_composites=True)
        self._stacks = [bool(spec.shape.num_elements()) for spec in self._specs]
        if any(spec.dtype in (tf.variant, tf.resource) for spec in self._specs):
            raise TypeError(
                f"elements of {element_spec} hold datasets or other variants, which "
                "only order='consecutive' can repeat; echo before the stage that "
                "makes them, such as window()"
            )
        # Most elements stack as they are.
        leaves = tf.nest.flatten(element_spec)
        self.is_needed = leaves != self._specs or not all(self._stacks)

    def pack(self, element: Any) -> tuple[tf.Tensor, ...]:
        tensors = tf.nest.flatten(element, expand_composites=True)
        tensors = [tensor for tensor in tensors if tensor is not None]
        return tuple(
            tensor if stacks else tf.io.serialize_tensor(tensor)
            for tensor, stacks in zip(tensors, self._stacks, strict=True)
        )

    def unpack(self, packed: tuple[tf.Tensor, ...]) -> Any:
        tensors = [
            tensor
            if stacks
            else tf.ensure_shape(tf.io.parse_tensor(tensor, spec.dtype), spec.shape)
            for tensor, spec, stacks in zip(
                packed, self._specs, self._stacks, strict=True
            )
        ]
        return tf.nest.pack_sequence_as(
            self._element_spec, tensors, expand_composites=True
        )


class _Walk:
    """An order as a pure function: integers before a chunk to those after it."""

    # The integers are the round, its anchor and carry, its number of uses so far, the
    # number of the next element, and the uses that wait for a whole batch. The fresh
    # indices of the kept elements ascend, as the elements do.

    def __init__(self, spec: EchoSpec, start: Mapping[str, int], unit: int):
        # Uses leave in multiples of ``unit``, until the dataset ends.
        self._order, self._start, self._unit = rounds_of(spec), start, unit
        self.first = np.array([*(start[key] for key in _PLACE), start["anchor"]])
        used, (pieces, piece, _, at) = [_NONE], self._begin(*self.first[:-1].tolist())
        while piece.anchor < start["fresh"]:
            used.append(piece.index[at:])
            piece, at = next(pieces), 0
        taken = np.arange(start["anchor"], start["fresh"])
        self._used_up = np.setdiff1d(taken, np.concatenate(used))
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
        pieces = map(self._within_end, self._order.pieces(round_, anchor, carry))
        piece, before = next(pieces), 0
        while position - before > piece.index.size:
            before += piece.index.size
            piece = next(pieces)
        return pieces, piece, before, position - before

    def _within_end(self, piece: Piece) -> Piece:
        """Leaves out items that do not come, as states of that time count."""
        if self._start["end"] < 0:
            return piece
        there = piece.index < self._start["end"]
        index, repeat, last = piece.index[there], piece.repeat[there], piece.last[there]
        newest = np.maximum.accumulate(index)
        place = piece.round, piece.anchor, piece.carry
        return Piece(*place, index, repeat, last, newest)


def _chunk_sizes(first: int, most: int) -> np.ndarray:
    """Returns sizes that double from the first one, the last of which is ``most``."""
    sizes = [min(first, most)]
    while sizes[-1] < most:
        sizes.append(min(sum(sizes), most))
    return np.array(sizes, np.int64)


def _in_chunks(
    dataset: tf.data.Dataset,
    spec: EchoSpec,
    start: Mapping[str, int],
    tags: bool,
    batch: bool,
    drop_remainder: bool,
) -> tf.data.Dataset:
    """Returns the uses that each chunk of elements allows, or whole batches of them."""
    packing = _Packing(dataset.element_spec)
    if packing.is_needed:
        # A scan, because tf.data may make a map parallel, and so read ahead.
        nothing = tf.constant(0)
        dataset = dataset.scan(nothing, lambda _, item: (nothing, packing.pack(item)))
    # Packed elements are stacked after they are unpacked.
    stacks = batch and not packing.is_needed
    # Half a buffer of uses: smaller chunks copy the kept elements too often.
    most = math.ceil(spec.buffer / (2 * spec.schedule.max_factor))
    sizes = _chunk_sizes(spec.batch_size, most)
    starts = np.cumsum(sizes) - sizes
    walk = _Walk(spec, start, spec.batch_size if stacks else 1)

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
        def read(places, index, repeat):
            found = tf.nest.map_structure(lambda leaf: tf.gather(leaf, places), items)
            return (found, UseInfo(index, repeat)) if tags else found

        # A call per use would take longer than everything else.
        size = spec.batch_size if stacks else _USES_AT_ONCE
        parts: Any = tf.data.Dataset.from_tensor_slices(uses)
        parts = parts.batch(size, drop_remainder and stacks).map(read)
        parts = parts if stacks else parts.unbatch()
        if not packing.is_needed:
            return parts
        if tags:
            return parts.map(lambda item, tag: (packing.unpack(item), tag))
        return parts.map(lambda *item: packing.unpack(item))

    nothing = tf.nest.map_structure(
        lambda leaf: tf.zeros([0, *leaf.shape], leaf.dtype), dataset.element_spec
    )
    numbered: Any = dataset.enumerate()
    uses = (
        numbered.group_by_window(
            chunk_of,
            lambda chunk, elements: elements.batch(size_of(chunk)),
            window_size_func=size_of,
        )
        # A chunk without elements tells that the dataset has ended.
        .concatenate(tf.data.Dataset.from_tensors((_NONE, nothing)))
        .scan((walk.first, _NONE, nothing, _NONE), advance)
        .flat_map(emit)
    )
    if batch and not stacks:
        return uses.batch(spec.batch_size, drop_remainder)
    return uses
