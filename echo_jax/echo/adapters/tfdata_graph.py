"""The store of an echo for `tf.data`: the graph keeps elements, a plan says which.

The graph calls the host's plan as a pure function of integers, once for each chunk of
fresh elements. So TensorFlow can checkpoint it like its own operations.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from echo_jax.echo.counts import UseInfo
from echo_jax.echo.orders import rounds_of
from echo_jax.echo.plans.fixed import FixedPlan
from echo_jax.echo.spec import EchoSpec

try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(
        "tf.data needs TensorFlow, which is not installed; run "
        "pip install 'echo-jax[tfdata]'"
    ) from error

_USES_AT_ONCE = 64
_COUNTS_AT_ONCE = 1024
_NONE = np.zeros(0, np.int64)


@dataclass
class GraphEcho:
    """The function that `echo` of `tfdata` returns, for an `EchoSpec`."""

    spec: EchoSpec
    batch: bool
    drop_remainder: bool
    tags: bool
    state: Mapping[str, int] | None  # None for that of a new plan

    def __post_init__(self):
        self._walk = _Walk(self.spec, self.state)

    @tf.autograph.experimental.do_not_convert
    def __call__(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        element_spec, nothing = dataset.element_spec, tf.constant(0)
        if rounds_of(self.spec).by_item:
            uses = self._back_to_back(dataset)
        elif _stacks(element_spec):
            return self._in_chunks(dataset)
        else:
            # A scan, because tf.data may make a map parallel, and so read ahead.
            packed = dataset.scan(nothing, lambda _, x: (nothing, _pack(x)))
            uses = self._in_chunks(packed, partial(_unpack, element_spec))
        size = self.spec.batch_size
        return uses.batch(size, self.drop_remainder) if self.batch else uses

    def _back_to_back(self, dataset: tf.data.Dataset) -> Any:
        """Returns all uses of an item before it reads the next one."""

        def count(first, carry):
            return self.spec.schedule.uses(first, _COUNTS_AT_ONCE, carry)

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

        start, most = self._walk.start, np.iinfo(np.int64).max - _COUNTS_AT_ONCE
        firsts = tf.data.Dataset.range(start["anchor"], most, _COUNTS_AT_ONCE)
        numbers: Any = firsts.scan(np.int64(start["carry"]), number)
        counted: Any = tf.data.Dataset.zip((dataset, numbers.unbatch()))
        return counted.flat_map(repeat).skip(start["position"])

    def _in_chunks(self, dataset: Any, unpack: Any = None) -> Any:
        """Returns the uses that each chunk of fresh elements allows."""
        # Elements that stack come out in batches if these are wanted.
        batch = self.batch and not unpack
        # Chunks double up to a buffer of uses: with smaller ones the elements that are
        # kept would be copied too often.
        most = math.ceil(self.spec.buffer / self.spec.schedule.max_factor)
        sizes = [min(self.spec.batch_size, most)]
        while sizes[-1] < most:
            sizes.append(min(sum(sizes), most))
        sizes = np.array(sizes, np.int64)
        starts = np.cumsum(sizes) - sizes
        # Uses leave in multiples of it, until the dataset ends.
        unit = self.spec.batch_size if batch else 1
        walk = partial(self._walk, unit)

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
                item = tf.nest.map_structure(lambda x: tf.gather(x, places), items)
                item = unpack(item) if unpack else item
                return (item, UseInfo(*tag)) if self.tags else item

            parts: Any = tf.data.Dataset.from_tensor_slices(uses)
            if unpack:
                return parts.map(read)
            # A call per use would take longer than everything else.
            size = self.spec.batch_size if batch else _USES_AT_ONCE
            parts = parts.batch(size, batch and self.drop_remainder).map(read)
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
            .scan((self._walk.first, _NONE, nothing, _NONE), advance)
            .flat_map(emit)
        )


def _stacks(element_spec: Any) -> bool:
    """Returns whether elements stack as they are; TypeError for variants."""
    # Otherwise their tensors are packed into strings: if the shape of one is not fully
    # known, as of an image before it is cropped, or if one has no elements, because
    # TensorFlow 2.21 fails to unbatch a stack of those.
    specs = tf.nest.flatten(element_spec, expand_composites=True)
    if any(spec.dtype in (tf.variant, tf.resource) for spec in specs):
        raise TypeError(
            f"elements of {element_spec} hold datasets or other variants, which "
            "only order='consecutive' can repeat; echo before the stage that "
            "makes them, such as window()"
        )
    is_plain = tf.nest.flatten(element_spec) == specs
    return is_plain and all(spec.shape.num_elements() for spec in specs)


def _pack(element: Any) -> tuple[tf.Tensor, ...]:
    tensors = tf.nest.flatten(element, expand_composites=True)
    return tuple(tf.io.serialize_tensor(t) for t in tensors if t is not None)


def _unpack(element_spec: Any, packed: tuple[tf.Tensor, ...]) -> Any:
    specs = tf.nest.flatten(element_spec, expand_composites=True)
    tensors = [
        tf.ensure_shape(tf.io.parse_tensor(tensor, spec.dtype), spec.shape)
        for tensor, spec in zip(packed, specs, strict=True)
    ]
    return tf.nest.pack_sequence_as(element_spec, tensors, expand_composites=True)


class _Walk:
    """A plan as a pure function: integers before a chunk to those after it."""

    # The integers are a state of the plan, and the number of the next element. The
    # fresh indices of the kept elements ascend, as the elements do.

    def __init__(self, spec: EchoSpec, state: Mapping[str, int] | None):
        plan = FixedPlan(spec)
        self._spec, self.start = spec, state or plan.get_state()
        restored = plan.set_state(self.start)
        (gone,) = np.nonzero(restored.slots[0] == plan.num_slots)
        self._used_up = restored.first + gone
        integers = plan.get_state()
        self._keys = [*integers]
        self.first = np.array([*integers.values(), self.start["anchor"]])
        # The plan at the integers of the last call, so that the next need not go there.
        self._live: dict[bytes, FixedPlan] = {}

    def __call__(
        self, unit: int, integers: np.ndarray, held: np.ndarray, count: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Returns integers, held indices, and places to keep; then a chunk's uses."""
        # The uses are places among the held and the fresh elements, indices, repeats.
        *values, came = integers.tolist()
        items = np.concatenate([held, np.arange(came, came + count)])
        came += int(count)
        if not count and came < self.start["fresh"]:
            raise ValueError(
                f"the dataset ended before item {came}, and the state has used items "
                f"up to {self.start['fresh'] - 1}; give the dataset that the state "
                f"was saved with, from item {self.start['anchor']} on"
            )
        plan = self._live.pop(integers.tobytes(), None)
        if plan is None:
            plan = FixedPlan(self._spec)
            plan.set_state(dict(zip(self._keys, values, strict=True)))
        if not count:
            plan.end(came - plan.row)
        parts = [np.zeros((3, 0), np.int64)]
        while decision := plan.decide(unit, 0):
            uses, rows, *_ = decision
            ready = int(rows.searchsorted(came, "right"))
            if count:
                ready -= ready % unit
            if ready:
                plan.settle(ready, int(rows[ready - 1]))
                columns: Any = uses.fresh_index, uses.repeat, uses.last
                parts.append(np.concatenate([column[:, :ready] for column in columns]))
            if ready < rows.size:
                break
        index, repeat, last = np.concatenate(parts, axis=1)
        places, keep = np.searchsorted(items, index), ~np.isin(items, self._used_up)
        keep[places[last > 0]] = False
        integers = np.array([*plan.get_state().values(), came])
        self._live = {integers.tobytes(): plan}
        kept = np.flatnonzero(keep)
        return integers, items[kept], kept, places, index, repeat.astype(np.int32)
