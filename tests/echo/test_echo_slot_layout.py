"""Leaves lie in their slots as they came, flat or in whole tiles."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import echo_jax as ej
from echo_jax.echo.device_feed import DeviceFeed
from echo_jax.echo.plans import make_plan
from echo_jax.echo.plans.lanes import Lanes
from echo_jax.echo.stores.device import EchoBuffer
from echo_jax.echo.stores.slot_layout import SlotLayout

DTYPES = ("uint8", "bool", "int16", "float16", "bfloat16", "int32", "float32")


def layout_of(shape, dtype, tiled=True):
    return SlotLayout.of(jax.ShapeDtypeStruct(shape, dtype), tiled=tiled)


@pytest.mark.parametrize(
    ("shape", "dtype", "found"),
    [
        ((32, 32, 3), "uint8", ((24, 128), 1)),
        ((224, 224, 3), "uint8", ((1176, 128), 1)),
        # Tiles of bytes are 32 high, or 4, or 1: rows that do not fill them are added.
        ((28, 28), "uint8", ((8, 128), 1)),
        ((2, 128), "uint8", ((4, 128), 1)),
        ((100,), "bool", ((1, 128), 1)),
        # Short rows of words lie beside each other.
        ((513,), "int32", ((640,), 1)),
        ((100, 4), "float32", ((512,), 1)),
        ((80, 100), "float32", ((64, 128), 1)),
        # Beyond 192 KiB the compiler cuts rows by copying all of them.
        ((256, 256, 3), "uint8", ((1536, 128), 1)),
        ((300, 300, 3), "uint8", ((1056, 128), 2)),
        ((5,), "int32", ((5,), 1)),
        ((), "int32", ((), 1)),
        ((0, 3), "int32", ((0,), 1)),
    ],
)
def test_slots_are_whole_tiles(shape, dtype, found):
    layout = layout_of(shape, dtype)
    assert (layout.shape, layout.parts) == found
    itemsize = np.dtype(dtype).itemsize
    assert layout.num_bytes == found[1] * math.prod(found[0]) * itemsize
    flat = layout_of(shape, dtype, tiled=False)
    assert flat.shape == ((math.prod(shape),) if shape else ())
    assert flat.num_bytes == math.prod(shape) * itemsize


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.lists(st.integers(0, 12), min_size=1, max_size=8, unique=True),
)
def test_what_is_written_is_read_and_nothing_else_is_changed(
    shape, dtype, tiled, slots
):
    layout, num_slots = layout_of(shape, dtype, tiled), 9
    rng = np.random.default_rng(len(slots))
    before, rows = (
        rng.integers(0, 2 if dtype == "bool" else 100, (n, *shape)).astype(
            jax.numpy.dtype(dtype)
        )
        for n in (num_slots, len(slots))
    )
    array = layout.zeros(1, num_slots)[0]
    array = layout.write(array, before, np.arange(num_slots, dtype=np.int32))
    array = layout.write(array, rows, np.array(slots, np.int32))
    expected = before.copy()
    for row, slot in zip(rows, slots, strict=True):
        if slot < num_slots:  # Others are dropped.
            expected[slot] = row
    found = layout.read(array, np.arange(num_slots, dtype=np.int32)[::-1])
    assert found.dtype == array.dtype == before.dtype
    np.testing.assert_array_equal(np.asarray(found), expected[::-1])


def test_an_item_in_parts_comes_back_whole():
    layout = layout_of((300, 300, 3), "uint8")
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (3, 300, 300, 3), np.uint8)
    array = layout.zeros(1, 4)[0]
    assert array.shape == (8, 1056, 128)
    array = layout.write(array, rows, np.array([3, 4, 0], np.int32))
    found = np.asarray(layout.read(array, np.arange(4, dtype=np.int32)))
    assert (found[3] == rows[0]).all() and (found[0] == rows[2]).all()
    assert not found[1:3].any()


def test_a_large_batch_is_read_in_parts():
    """A TPU's compiler runs out of memory where it changes its layout at once."""
    layout = layout_of((256, 256, 3), "uint8")
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (5, 256, 256, 3), np.uint8)
    array = layout.write(layout.zeros(1, 5)[0], rows, np.arange(5, dtype=np.int32))
    slots = rng.integers(0, 5, 51).astype(np.int32)
    assert "scan" in str(jax.make_jaxpr(layout.read)(array, slots))
    assert "scan" not in str(jax.make_jaxpr(layout.read)(array, slots[:40]))
    np.testing.assert_array_equal(layout.read(array, slots), rows[slots])


def test_batches_are_the_same_from_tiles():
    rng = np.random.default_rng(0)
    batches = [
        {
            "image": rng.integers(0, 256, (16, 9, 7, 3), np.uint8),
            "boxes": rng.normal(size=(16, 10, 4)).astype(np.float32),
            "label": np.arange(16 * k, 16 * k + 16, dtype=np.int32),
        }
        for k in range(6)
    ]
    spec = ej.EchoSpec(2, 48, "spread", 16)
    plan = make_plan(spec, lanes=Lanes(16, 4))
    flat = EchoBuffer.of(batches[0], num_slots=plan.num_slots, num_lanes=8)
    flat = replace(flat, num_lanes=4, mesh=jax.make_mesh((4,), ("data",)))
    tiled = replace(flat, tiled=True)
    assert not flat.tiled and tiled.bytes_per_item > flat.bytes_per_item

    def drawn(buffer):
        feed = DeviceFeed(batches, make_plan(spec, lanes=Lanes(16, 4)), buffer)
        draw = jax.jit(buffer.draw)
        while (inputs := feed.next()) is not None:
            yield jax.tree.map(np.asarray, draw(feed.arrays, inputs)[0])

    pairs = list(zip(drawn(flat), drawn(tiled), strict=True))
    assert len(pairs) == 12
    for one, other in pairs:
        jax.tree.map(np.testing.assert_array_equal, one, other)
