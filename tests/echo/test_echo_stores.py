"""What the stores keep truly, what they refuse, and that they refuse it in time."""

import dataclasses
import pathlib
import threading
from collections import deque

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from echo_cases import mesh_of
from jax.sharding import AxisType

import echo_jax as ej

EchoBuffer = ej.device.EchoBuffer

# Many items here are arrays of some rows, as a batch is.
pytestmark = pytest.mark.filterwarnings("ignore:each item that ej.echo")
SMALL = np.arange(6).reshape(2, 3)
RECORDS = np.array([(1, 2.5), (3, 4.5)], [("id", "i4"), ("score", "f8")])


def of_dtype(dtype):
    return (SMALL % 2).astype(dtype)


# Arrays that every store on the host keeps as they are.
ARRAYS = {
    "0-d": np.array(3, np.int8),
    "fortran": np.asfortranarray(SMALL.astype(np.float32)),
    "broadcast": np.broadcast_to(np.float32(2), (3, 2)),
    "big_endian": SMALL.astype(">i4"),
    "records": RECORDS,
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "variable_text": np.array(["a", "a long text " * 5], np.dtypes.StringDType()),
    "datetime": np.array(["2024-02-29", "NaT"], "M8[D]"),
    "complex": SMALL.astype(np.complex64),
    "bfloat16": of_dtype(ml_dtypes.bfloat16),
    "int4": of_dtype(ml_dtypes.int4),
    "bool": of_dtype(bool),
    "nan": np.array([np.nan, -0.0, np.inf], np.float16),
}
SCALARS = [
    (5, "int64"),
    (True, "bool"),
    (np.float32(0.5), "float32"),
    ("abc", "<U3"),
    (b"\0ab", "S3"),
    (np.datetime64("2024-02-29"), "M8[D]"),
]


@dataclasses.dataclass
class Unregistered:
    """A dataclass that jax was not told of."""

    image: np.ndarray
    label: int = 0


class Attributes:
    """An object with what it is given, at some depth."""

    def __init__(self, thing):
        self.things = [{"thing": thing}]


def both(item):
    """The echoes of an item, one at a time and in batches."""
    spec = ej.EchoSpec(2, batch_size=2)
    return [ej.echo([item], spec), ej.echo([item], spec, batch=True)]


def refusal(echo):
    with pytest.raises(ValueError) as caught:
        next(echo)
    return str(caught.value)


@pytest.mark.parametrize("is_flat", [True, False])
def test_arrays_are_kept_with_their_dtypes_and_values(is_flat):
    numbers = {"k": 0, "small": np.zeros(2), "large": np.zeros((40, 40))}

    def item(k):
        leaves = ARRAYS | {name: x + k for name, x in numbers.items()}
        return leaves if is_flat else [leaves]

    def check(out, k, rank=0):
        out = out if is_flat else out[0]
        for name, array in ARRAYS.items():
            leaf = out[name]
            assert type(leaf) is np.ndarray
            assert (leaf.dtype, leaf.ndim) == (array.dtype, array.ndim + rank)
            assert not np.shares_memory(leaf, array) or not leaf.size
            for one in leaf if rank else [leaf]:
                np.testing.assert_array_equal(one, array)
        for name, x in numbers.items():
            for row, one in enumerate(out[name] if rank else [out[name]]):
                np.testing.assert_array_equal(one, x + k + row)

    for number, out in enumerate(ej.echo(map(item, range(4)), ej.EchoSpec(2))):
        check(out, number // 2)
    # All but the first of them, which are looked at, are read eight at a time.
    spec = ej.EchoSpec(1, batch_size=8)
    batches = [*ej.echo(map(item, range(40)), spec, batch=True)]
    assert len(batches) == 5
    for number, out in enumerate(batches):
        check(out, 8 * number, rank=1)


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        ({"a": np.zeros(3), "b": 1}, ["item['a'] is float64[3]", "pad or resize"]),
        ({"a": np.zeros(2), "b": 1.5}, ["item['b'] is float64[], the", "int64[]"]),
        ({"a": np.zeros(2)}, ["leaves [\"['a']\"], the first", "of one structure"]),
        ({"a": np.zeros(2), "b": 1, "c": 1}, ["['c']", "items of one structure"]),
        ({"a": np.ma.zeros(2), "b": 1}, ["masked array"]),
        ({"a": np.zeros(2), "b": np.array([None])}, ["item['b'] is a", "no array"]),
    ],
)
@pytest.mark.parametrize("at", [1, 38])
def test_one_bad_item_is_refused_alone_and_among_many(bad, parts, at):
    items = [{"a": np.zeros(2), "b": 1}] * 40
    items[at] = bad
    with pytest.raises(ValueError) as caught:
        list(ej.echo(items, ej.EchoSpec(batch_size=8), batch=True))
    assert not [part for part in parts if part not in str(caught.value)]


def test_a_scalar_stays_one_alone_and_becomes_an_array_in_a_batch():
    for value, dtype in SCALARS:
        singles, (batch,) = map(list, both(value))
        assert [(type(out), out) for out in singles] == [(type(value), value)] * 2
        assert batch.dtype == dtype
        assert batch.tolist() == np.array([value] * 2).tolist()


class InSharedMemory(np.ndarray):
    """As what Grain's workers send: a class that says where memory lies."""


def test_a_class_of_memory_becomes_a_plain_array(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.int64, "w+", shape=(2, 3))
    mapped[:] = SMALL
    for array in (mapped, SMALL.view(InSharedMemory)):
        single, batch = both({"x": array})
        for out in [*single, *batch]:
            assert type(out["x"]) is np.ndarray
            assert (out["x"] == SMALL).all()


def test_a_subclass_of_an_array_is_kept_alone_and_not_stacked():
    array = SMALL.view(np.matrix)
    single, batch = both({"x": array})
    for out in single:
        assert type(out["x"]) is type(array) and (out["x"] == array).all()
        assert not out["x"].flags.writeable
    message = refusal(batch)
    assert "item['x'] is a numpy.matrix" in message
    assert "np.asarray(leaf)" in message and "batch=False" in message


def test_an_array_of_jax_stays_one_alone_and_stacks_on_the_host():
    x = jnp.arange(3, dtype=jnp.bfloat16)
    singles, (batch,) = map(list, both([x]))
    assert all(isinstance(out[0], jax.Array) for out in singles)
    assert type(batch[0]) is np.ndarray and batch[0].dtype == jnp.bfloat16
    key = jax.random.key(0)
    single, batch = both({"key": key})
    assert next(single)["key"] == key
    message = refusal(batch)
    assert "item['key'] is a " in message and "batch=False" in message


def test_a_masked_array_is_refused_with_its_path():
    item = {"a": [SMALL, np.ma.array([1, 2], mask=[0, 1])]}
    for echo in (*both(item), ej.echo([item], ej.EchoSpec(1))):
        message = refusal(echo)
        assert "item['a'][1] is a " in message and "filled(value)" in message


def test_a_container_that_nobody_registered_is_copied_alone_and_not_stacked():
    for leaf in (Unregistered(SMALL), Attributes(jnp.zeros(2)), {"a", "b"}):
        single, batch = both({"a": [SMALL, leaf]})
        first, second = (out["a"][1] for out in single)
        assert type(first) is type(leaf) and first is not second
        message = refusal(batch)
        assert "item['a'][1] is a " in message and "register" in message
    uses = [out["a"] for out in both({"a": Unregistered(SMALL)})[0]]
    uses[0].image[:] = -1
    assert (uses[1].image == SMALL).all()


def test_what_numpy_makes_an_array_of_stacks():
    single, (batch,) = both({"x": deque([1, 2])})
    assert [out["x"] for out in single] == [deque([1, 2])] * 2
    assert batch["x"].tolist() == [[1, 2]] * 2


def test_objects_are_copied_alone_and_not_stacked():
    leaf = pathlib.Path("a"), np.array([[1], [2, 3]], object)
    single, batch = both({"x": leaf})
    for out in single:
        path, ragged = out["x"]
        assert path == leaf[0]
        assert ragged.tolist() == [[1], [2, 3]] and ragged[0] is not leaf[1][0]
        ragged[0].append(9)
    assert "item['x'][0] is a pathlib.PosixPath, which is no array" in refusal(batch)


def test_text_whose_end_would_be_lost_does_not_stack():
    text = "ab\0"
    single, batch = both({"x": text})
    assert [out["x"] for out in single] == [text, text]
    assert "item['x'] is text that ends with a NUL" in refusal(batch)


def test_what_cannot_be_copied_is_refused():
    message = refusal(both({"lock": threading.Lock()})[0])
    assert "item['lock'] is a _thread.lock, which cannot be copied" in message


def reusing(num_items):
    """Yields one array again and again, with another item in it."""
    array = np.zeros(3)
    for number in range(num_items):
        array[:] = number
        yield array


@pytest.mark.parametrize("prefetch", [0, 2])
def test_items_may_lie_in_one_array_that_the_upstream_uses_again(prefetch):
    found = ej.echo(reusing(9), ej.EchoSpec(2, batch_size=4), prefetch=prefetch)
    assert [int(item[0]) for item in found] == [k for k in range(9) for _ in range(2)]


def through_buffer(batch, mesh):
    buffer = EchoBuffer.of(batch, num_slots=8 // mesh.size, mesh=mesh)
    slots = np.tile(np.arange(8 // mesh.size, dtype=np.int32), (mesh.size, 1))
    arrays = jax.jit(buffer.write)(buffer.init(), buffer.put(batch), slots)
    return jax.jit(buffer.read)(arrays, slots)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_buffer_keeps_numbers_of_every_dtype(kind):
    dtypes = ["bool", "uint8", "int64", "uint64", "float16", "complex64", "float64"]
    dtypes += ["bfloat16", "float8_e4m3fn", "int4"]
    rows = np.arange(24).reshape(8, 3) % 3
    batch = {dtype: rows.astype(jnp.dtype(dtype)) for dtype in dtypes}
    batch |= {"empty": np.zeros((8, 0, 3), np.float32), "jax": jnp.zeros((8, 0, 3))}
    found = through_buffer(batch, mesh_of(2, kind))
    for name, leaf in batch.items():
        assert found[name].dtype == jax.dtypes.canonicalize_dtype(leaf.dtype)
        np.testing.assert_array_equal(np.asarray(found[name]), leaf)


def test_64_bits_stay_where_jax_has_them():
    rows = np.tile([1, 2**62, 3, 2**62 + 2**10], 2)
    dtypes = ["int64", "uint64", "float64", "complex128"]
    batch = {dtype: rows.astype(dtype) for dtype in dtypes}
    spec = ej.EchoSpec(batch_size=8)
    with jax.enable_x64(True):
        (found,) = ej.device.echo_batches([batch], spec, mesh=mesh_of(2))
        for dtype, leaf in found.items():
            assert leaf.dtype == dtype
            np.testing.assert_array_equal(np.asarray(leaf), batch[dtype])


@pytest.mark.parametrize(
    ("dtype", "value", "name"),
    [("int64", -(2**31) - 1, "int32"), ("uint64", 2**32, "uint32")],
)
def test_an_integer_that_does_not_fit_is_refused(dtype, value, name):
    batch = {"id": np.array([1, 2], dtype)}
    buffer = EchoBuffer.of(batch, num_slots=1, mesh=mesh_of(1))
    buffer.put(batch)
    batch["id"][1] = value
    with pytest.raises(ValueError) as caught:
        buffer.put(batch)
    message = str(caught.value)
    assert f"{min(1, value)} to {max(1, value)}, which do not fit {name}" in message
    assert "item['id']" in message and "jax_enable_x64" in message


@pytest.mark.parametrize(
    ("leaf", "parts"),
    [
        (np.array(["a", "b"]), ["dtype <U1, which devices do not have"]),
        (np.arange(2, dtype=">i4"), ["dtype >i4", "byte order"]),
        (np.ma.array([1, 2]), ["masked array"]),
        (3, ["axis of examples", "item['x']", "have none"]),
        (Unregistered(SMALL), ["tree_util.register_dataclass"]),
        ([np.zeros(2), np.zeros(3)], ["item['x'][1] has 3 rows"]),
        ([], ["its leaves, [], have none"]),
        (jax.random.split(jax.random.key(0)), ["jax.random.key_data"]),
    ],
)
def test_a_buffer_refuses_what_no_device_has(leaf, parts):
    with pytest.raises(ValueError) as caught:
        EchoBuffer.of({"x": leaf}, num_slots=2, mesh=mesh_of(1))
    assert not [part for part in parts if part not in str(caught.value)]


def test_a_short_last_batch_is_refused_with_both_sizes_and_the_cure():
    batches, spec = (
        iter([np.arange(8.0), np.arange(4.0)]),
        ej.EchoSpec(2, 1, "consecutive", 8),
    )
    echo = ej.device.echo_batches(batches, spec, mesh=mesh_of(2), prefetch=0)
    next(echo)
    next(echo)
    message = refusal(echo)
    assert "has 4 rows, the first one had 8" in message
    assert "drop_remainder=True" in message and "drop_last=True" in message


# A shape and dtype of a leaf, and the shape and number of the places of a slot.
TILES = [
    ((32, 32, 3), "uint8", (24, 128), 1),
    # Tiles of bytes are 32 high, or 4, or 1: rows that do not fill them are added.
    ((28, 28), "uint8", (8, 128), 1),
    ((100,), "bool", (1, 128), 1),
    # Short rows of words lie beside each other.
    ((513,), "int32", (640,), 1),
    ((100, 4), "float32", (512,), 1),
    # Beyond 192 KiB the compiler cuts rows by copying all of them.
    ((256, 256, 3), "uint8", (1536, 128), 1),
    ((300, 300, 3), "uint8", (1056, 128), 2),
    ((40, 31), "bfloat16", (16, 128), 1),
    ((5,), "int32", (5,), 1),
    ((0, 3), "int32", (0,), 1),
]


def tiled(rows, num_slots, is_tiled=True):
    """A buffer as on a TPU, its empty slots, and its compiled functions."""
    buffer = EchoBuffer.of(rows, num_slots=num_slots, mesh=mesh_of(1))
    buffer = dataclasses.replace(buffer, tiled=is_tiled)
    return buffer, buffer.init(), jax.jit(buffer.write), jax.jit(buffer.read)


@pytest.mark.parametrize("is_tiled", [True, False])
def test_slots_are_whole_tiles_and_keep_what_is_written(is_tiled):
    rng = np.random.default_rng(0)
    rows = [
        rng.integers(0, 2, (8, *shape)).astype(jnp.dtype(dtype))
        for shape, dtype, _, _ in TILES
    ]
    buffer, arrays, write, read = tiled(rows, 9, is_tiled)
    if is_tiled:
        assert [x.shape for x in arrays] == [(1, 9 * n, *tile) for *_, tile, n in TILES]
    assert buffer.num_bytes == sum(x.nbytes for x in arrays)
    expected = [np.zeros((9, *x.shape[1:]), x.dtype) for x in rows]
    for slots in (range(8), [5, 12, 0, 8, 9, 3, 10, 1], range(1, 9), range(4, 12)):
        arrays = write(arrays, buffer.put(rows), np.array([slots], np.int32))
        rows = [x[::-1] for x in rows]
        for leaf, x in zip(expected, rows, strict=True):
            for row, slot in zip(x[::-1], slots, strict=True):
                leaf[slot : slot + 1] = row  # Slots out of range are dropped.
    # As many as 51 large rows are read in parts.
    for slots in (np.arange(9)[::-1], rng.integers(0, 9, 51)):
        found = read(arrays, slots.astype(np.int32))
        for leaf, x in zip(found, expected, strict=True):
            assert leaf.dtype == x.dtype
            np.testing.assert_array_equal(np.asarray(leaf), x[slots])
