"""The store of an echo for `tf.data`: it keeps the items of a round in the graph.

`echo_jax.echo.adapters.tfdata_orders` makes the order of the uses round by round. It is
the order of the host.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from echo_jax.echo.adapters.tensorflow_extra import tf
from echo_jax.echo.adapters.tfdata_orders import (
    GraphSchedule,
    GraphShuffle,
    GraphSpread,
    RoundUses,
)
from echo_jax.echo.counts import UseInfo
from echo_jax.echo.orders import rounds_of
from echo_jax.echo.orders.consecutive import Consecutive
from echo_jax.echo.orders.spread import Spread
from echo_jax.echo.orders.window_shuffle import WindowShuffle
from echo_jax.echo.plans.fixed import FixedPlan
from echo_jax.echo.spec import EchoSpec

__all__ = ["graph_echo"]

_USES_PER_CHUNK = 64


def graph_echo(
    spec: EchoSpec,
    *,
    batch: bool,
    drop_remainder: bool,
    tags: bool,
    state: Mapping[str, int] | None,
) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    """Returns the function that `echo` of `tfdata` returns, for a checked spec."""
    order = rounds_of(spec)
    start = _Start.of(spec, state) if state else _Start(0, 0, 0)

    @tf.autograph.experimental.do_not_convert
    def apply(dataset: tf.data.Dataset) -> tf.data.Dataset:
        if isinstance(order, Consecutive):
            uses = _back_to_back(dataset, GraphSchedule(spec.schedule), start, tags)
        elif isinstance(order, WindowShuffle):
            uses = _in_rounds(dataset, GraphShuffle(order), start, tags)
        else:
            assert isinstance(order, Spread)
            uses = _in_rounds(dataset, GraphSpread(order), start, tags)
        if start.skip:
            uses = uses.skip(start.skip)
        if batch:
            uses = uses.batch(spec.batch_size, drop_remainder=drop_remainder)
        return uses

    return apply


class _Start(NamedTuple):
    """The item at which the graph starts, the carry before it, and the uses to skip."""

    item: int
    carry: int
    skip: int

    @classmethod
    def of(cls, spec: EchoSpec, state: Mapping[str, int]) -> "_Start":
        """Returns the start for the uses after a plan's state."""
        FixedPlan(spec).check_state(state)
        # All uses of the items before the anchor are over.
        before = spec.schedule.total(state["anchor"])
        assert before is not None, "a factor by item is refused"
        return cls(state["anchor"], state["carry"], state["uses"] - before)


def _back_to_back(
    dataset: tf.data.Dataset, schedule: GraphSchedule, start: _Start, tags: bool
) -> tf.data.Dataset:
    """Returns all uses of an item before it reads the next one."""

    def count(state, item):
        index, carry = state
        uses, carry = schedule.uses_of(index, carry)
        return (index + 1, carry), (item, index, uses)

    def repeat(item, index, uses):
        items = tf.data.Dataset.from_tensors(item).repeat(uses)
        if not tags:
            return items
        indices = tf.data.Dataset.from_tensors(index).repeat(uses)
        repeats = tf.data.Dataset.range(uses, output_type=tf.int32)
        return tf.data.Dataset.zip((items, UseInfo(indices, repeats)))

    first = (tf.constant(start.item, tf.int64), tf.constant(start.carry, tf.int64))
    counted: Any = dataset.scan(first, count)
    return counted.flat_map(repeat)


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


class _State(NamedTuple):
    """The order's state, and the items and their places that the next round keeps."""

    order: Any
    index: Any
    items: Any
    kept: Any


def _in_rounds(
    dataset: tf.data.Dataset,
    order: GraphSpread | GraphShuffle,
    start: _Start,
    tags: bool,
) -> tf.data.Dataset:
    """Returns the uses round by round, after the fresh items of a round's window."""
    packing = _Packing(dataset.element_spec)
    if packing.is_needed:
        # A scan, because tf.data may make a map parallel, and so read ahead.
        nothing = tf.constant(0)
        dataset = dataset.scan(nothing, lambda _, item: (nothing, packing.pack(item)))
    no_items = tf.nest.map_structure(
        lambda spec: tf.zeros([0, *spec.shape], spec.dtype), dataset.element_spec
    )
    no_index = tf.zeros([0], tf.int64)
    no_window = tf.data.Dataset.from_tensors((no_index, no_items))

    def window(number, numbered):
        filled = numbered.batch(order.windows.size(number))
        return filled.concatenate(no_window.repeat(order.windows.gap(number)))

    numbered: Any = dataset.enumerate(start.item)
    order_state = order.initial_state(start.item, start.carry)
    return (
        numbered.group_by_window(
            lambda index, _: order.windows.number_of(index),
            window,
            window_size_func=order.windows.size,
        )
        # Rounds without fresh items, for the remaining uses at the end.
        .concatenate(no_window.repeat(order.num_live - 1))
        .scan(
            _State(order_state, no_index, no_items, no_index),
            lambda state, fresh: _advance(order, state, fresh),
        )
        .flat_map(lambda items, uses: _emit(items, uses, packing, tags))
    )


def _advance(
    order: GraphSpread | GraphShuffle, state: _State, fresh: tuple[Any, Any]
) -> tuple[_State, tuple[Any, Any]]:
    """Returns the items of a round, and its uses as (places, indices, repeats)."""
    index, items = tf.nest.map_structure(
        lambda old, new: tf.concat([tf.gather(old, state.kept), new], 0),
        (state.index, state.items),
        fresh,
    )
    order_state, uses = order.advance(state.order)
    # At the end of the stream the order has uses of items that never came.
    newest = tf.reduce_max(tf.concat([[-1], index], 0))
    came = tf.where(uses.index <= newest)[:, 0]
    uses = RoundUses(*(tf.gather(column, came) for column in uses))
    places = tf.searchsorted(index, uses.index)
    used_up = tf.gather(places, tf.where(uses.last)[:, 0])
    is_kept = tf.tensor_scatter_nd_update(
        tf.ones_like(index, tf.bool), used_up[:, None], tf.zeros_like(used_up, tf.bool)
    )
    state = _State(order_state, index, items, tf.where(is_kept)[:, 0])
    return state, (items, (places, uses.index, tf.cast(uses.repeat, tf.int32)))


def _emit(items: Any, uses: Any, packing: _Packing, tags: bool) -> tf.data.Dataset:
    """Returns the uses of a round, one by one."""

    def read(places, index, repeat):
        read_items = tf.nest.map_structure(lambda a: tf.gather(a, places), items)
        return (read_items, UseInfo(index, repeat)) if tags else read_items

    # Uses are read in chunks: a call per use would take longer than everything else.
    chunks: Any = tf.data.Dataset.from_tensor_slices(uses).batch(_USES_PER_CHUNK)
    outputs = chunks.map(read).unbatch()
    if not packing.is_needed:
        return outputs
    if tags:
        return outputs.map(lambda item, tag: (packing.unpack(item), tag))
    return outputs.map(lambda *item: packing.unpack(item))
