"""The store of an echo for `tf.data`: the graph keeps elements, a plan says which.

The plan is the host's. The graph calls it as a pure function of integers, once for each
chunk of fresh elements, so TensorFlow can checkpoint it like its own operations.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from echo_jax.echo.adapters.tensorflow_extra import tf
from echo_jax.echo.counts import UseInfo
from echo_jax.echo.orders import rounds_of
from echo_jax.echo.orders.consecutive import Consecutive
from echo_jax.echo.plans.fixed import FixedPlan
from echo_jax.echo.spec import EchoSpec

__all__ = ["graph_echo"]

_USES_AT_ONCE = 64
_COUNTS_AT_ONCE = 1024
_MOST_LIVE_PLANS = 8


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
    plan = FixedPlan(spec)
    if state:
        plan.check_state(state)
    start = dict(state or plan.get_state())

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
    """A plan as a pure function: from the integers before a chunk to those after it."""

    # The integers are the plan's state and the number of the next element. The fresh
    # indices of the kept elements ascend, as the elements do.

    def __init__(self, spec: EchoSpec, unit: int, chunk: int):
        # Uses leave in multiples of ``unit``, until the dataset ends.
        self._spec, self._unit = spec, unit
        self._room = chunk + spec.batch_size
        self._live: dict[bytes, FixedPlan] = {}

    def __call__(
        self, integers: np.ndarray, held: np.ndarray, count: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Returns integers, held indices, and places to keep; then a chunk's uses."""
        # The uses are places among the held and the fresh elements, indices, repeats.
        *values, came = integers.tolist()
        state = dict(zip(_KEYS, values, strict=True))
        items = np.concatenate([held, np.arange(came, came + count)])
        written, came = max(state["fresh"], came), came + int(count)
        plan, keep = self._live.pop(integers.tobytes(), None), np.ones(items.size, bool)
        if came < state["fresh"]:
            if not count:
                raise ValueError(
                    f"the dataset ended before item {came}, and the state has used "
                    f"items up to {state['fresh'] - 1}; give the dataset that the "
                    f"state was saved with, from item {state['anchor']} on"
                )
            return _columns([*values, came], items, np.flatnonzero(keep), [])
        if plan is None:
            plan = FixedPlan(self._spec, room=self._room)
            first, slots, _ = plan.set_state(state)
            in_use = np.flatnonzero(slots[0] < plan.num_slots) + first
            keep = np.isin(items, in_use) | (items >= state["fresh"])
            plan.write(written - state["fresh"])
        plan.write(came - written)
        if not count:
            plan.end(0)
        uses, most = [], _USES_AT_ONCE * self._unit
        while not plan.need(self._unit).must and (part := plan.next(most)):
            places = np.searchsorted(items, part.fresh_index[0])
            assert part.last is not None
            keep[places[part.last[0]]] = False
            uses.append((places, part.fresh_index[0], part.repeat[0]))
        integers = np.array([*plan.get_state().values(), came])
        if len(self._live) >= _MOST_LIVE_PLANS:
            self._live.clear()
        self._live[integers.tobytes()] = plan
        return _columns(integers, items[keep], np.flatnonzero(keep), uses)


_KEYS = tuple(FixedPlan(EchoSpec()).get_state())
_NO_USES = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32))


def _columns(
    integers: Any, held: np.ndarray, kept: np.ndarray, uses: list[Any]
) -> tuple[np.ndarray, ...]:
    columns = map(np.concatenate, zip(_NO_USES, *uses, strict=True))
    return np.asarray(integers), held, kept, *columns


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
    walk = _Walk(spec, spec.batch_size if stacks else 1, int(sizes[-1]))

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
        integers.set_shape([len(_KEYS) + 1])
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
    none = tf.zeros([0], tf.int64)
    integers = np.array([*(start[key] for key in _KEYS), start["anchor"]])
    numbered: Any = dataset.enumerate()
    uses = (
        numbered.group_by_window(
            chunk_of,
            lambda chunk, elements: elements.batch(size_of(chunk)),
            window_size_func=size_of,
        )
        # A chunk without elements tells that the dataset has ended.
        .concatenate(tf.data.Dataset.from_tensors((none, nothing)))
        .scan((integers, none, nothing, none), advance)
        .flat_map(emit)
    )
    if batch and not stacks:
        return uses.batch(spec.batch_size, drop_remainder)
    return uses
