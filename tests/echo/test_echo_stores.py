"""What the stores keep truly, what they refuse, and that they refuse it in time."""

import dataclasses
import datetime
import pathlib
import threading
from collections import deque

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from echo_cases import grain_source
from jax.sharding import AxisType

import echo_jax as ej
from echo_jax.echo import device
from echo_jax.echo.stores.device import EchoBuffer, jitted_write
from echo_jax.echo.stores.host import ItemStore, RingStore

# Many items here are arrays of some rows, as a batch is.
pytestmark = pytest.mark.filterwarnings("ignore:each item that ej.echo")
SMALL = np.arange(6).reshape(2, 3)
RECORDS = np.array([(1, 2.5), (3, 4.5)], [("id", "i4"), ("score", "f8")])


def of_dtype(dtype):
    return (SMALL % 2).astype(dtype)


def read_only():
    array = SMALL.copy()
    array.flags.writeable = False
    return array


# Arrays that every store on the host keeps as they are.
ARRAYS = {
    "zero_size": np.zeros((0, 3), np.float32),
    "0-d": np.array(3, np.int8),
    "read_only": read_only(),
    "strided": np.arange(12)[::-2],
    "fortran": np.asfortranarray(SMALL.astype(np.float32)),
    "broadcast": np.broadcast_to(np.float32(2), (3, 2)),
    "big_endian": SMALL.astype(">i4"),
    "records": RECORDS,
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "variable_text": np.array(["a", "a long text " * 5], np.dtypes.StringDType()),
    "datetime": np.array(["2024-02-29", "NaT"], "M8[D]"),
    "timedelta": np.array([1, 2], "m8[ms]"),
    "complex": SMALL.astype(np.complex64),
    "longdouble": SMALL.astype(np.longdouble),
    "bfloat16": of_dtype(ml_dtypes.bfloat16),
    "float8": of_dtype(ml_dtypes.float8_e4m3fn),
    "int4": of_dtype(ml_dtypes.int4),
    "bool": of_dtype(bool),
    "nan": np.array([np.nan, -0.0, np.inf], np.float16),
}
SCALARS = {
    "int": (5, "int64"),
    "float": (0.5, "float64"),
    "bool": (True, "bool"),
    "complex": (1j, "complex128"),
    "numpy": (np.float32(0.5), "float32"),
    "text": ("abc", "<U3"),
    "bytes": (b"\0ab", "S3"),
    "date": (np.datetime64("2024-02-29"), "M8[D]"),
}


@dataclasses.dataclass
class Unregistered:
    """A dataclass that jax was not told of."""

    image: np.ndarray
    label: int = 0


class Attributes:
    """An object with what it is given, at some depth."""

    def __init__(self, thing):
        self.things = [{"thing": thing}]


def foreign(package):
    """An array of a library that need not be installed."""
    kind = type("Tensor", (), {"__module__": f"{package}.inner", "shape": (2,)})
    return type("Parameter", (kind,), {"__module__": "user"})()


def both(item):
    """The echoes of an item, one at a time and in batches."""
    spec = ej.EchoSpec(2, batch_size=2)
    return [ej.echo([item], spec), ej.echo([item], spec, batch=True)]


def refusal(echo):
    with pytest.raises(ValueError) as caught:
        next(echo)
    return str(caught.value)


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_is_kept_with_its_dtype_and_values(kind):
    array = ARRAYS[kind]
    singles, (batch,) = map(list, both({"x": array, "y": [array]}))
    for out, rank in [(single, 0) for single in singles] + [(batch, 1)]:
        for leaf in (out["x"], out["y"][0]):
            assert type(leaf) is np.ndarray
            assert (leaf.dtype, leaf.ndim) == (array.dtype, array.ndim + rank)
            for one in leaf if rank else [leaf]:
                np.testing.assert_array_equal(one, array)
            assert not np.shares_memory(leaf, array) or not leaf.size


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("is_flat", [True, False])
def test_items_that_are_read_together_are_kept_as_one_by_one(kind, is_flat):
    array = ARRAYS[kind]
    of_numbers = {"k": 0, "small": np.zeros(2), "large": np.zeros((40, 40))}

    def item(k):
        leaves = {"kind": array, **{name: x + k for name, x in of_numbers.items()}}
        return leaves if is_flat else [leaves]

    # All but the first of them, which are looked at, are read eight at a time.
    spec = ej.EchoSpec(1, batch_size=8)
    batches = [*ej.echo(map(item, range(40)), spec, batch=True)]
    for first, batch in zip(range(0, 40, 8), batches, strict=True):
        batch = batch if is_flat else batch[0]
        assert batch["kind"].dtype == array.dtype
        for row, k in enumerate(range(first, first + 8)):
            np.testing.assert_array_equal(batch["kind"][row], array)
            for name, x in of_numbers.items():
                np.testing.assert_array_equal(batch[name][row], x + k)


def test_one_bad_item_among_many_that_are_read_together_is_refused():
    store, good = RingStore(4), {"a": np.zeros(2), "b": 1}
    for _ in range(20):
        store.prepare([good])
    bad = [
        {"a": np.zeros(3), "b": 1},
        {"a": np.zeros(2, np.float32), "b": 1},
        {"a": np.zeros(2), "b": 1.5},
        {"a": np.zeros(2)},
        {"a": np.zeros(2), "c": 1},
        {"a": np.zeros(2), "b": 1, "c": 1},
        {"a": np.ma.zeros(2), "b": 1},
        [np.zeros(2), 1],
    ]
    for each in bad:
        with pytest.raises(ValueError, match="item"):
            store.prepare([good, good, each, good])
    ((columns, first, end),) = store.prepare([good, good])
    assert (len(columns), first, end) == (2, 0, 2)


def test_an_item_keeps_the_order_of_its_memory():
    fortran, plain = ARRAYS["fortran"], np.zeros((2, 3))
    out = next(ej.echo([[fortran, plain]], ej.EchoSpec(2)))
    assert out[0].flags.f_contiguous and out[1].flags.c_contiguous


@pytest.mark.parametrize("kind", SCALARS)
def test_a_scalar_stays_one_alone_and_becomes_an_array_in_a_batch(kind):
    value, dtype = SCALARS[kind]
    singles, (batch,) = map(list, both(value))
    assert [(type(out), out) for out in singles] == [(type(value), value)] * 2
    assert batch.dtype == dtype and batch.tolist() == np.array([value] * 2).tolist()


def test_a_record_is_copied_for_every_use():
    upstream = RECORDS.copy()
    first, second = ej.echo([upstream[0]], ej.EchoSpec(2))
    upstream["id"] = 7
    first["id"] = 8
    assert second.item() == (1, 2.5) and type(second) is np.void


def test_a_memory_map_becomes_a_plain_array(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.int32, "w+", shape=3)
    mapped[:] = [1, 2, 3]
    for out in (out for echo in both(mapped) for out in echo):
        assert type(out) is np.ndarray and out.dtype == np.int32
        assert out.reshape(-1, 3)[-1].tolist() == [1, 2, 3]


class InSharedMemory(np.ndarray):
    """As what Grain's workers send: a class that says where memory lies."""


def test_a_class_of_memory_becomes_a_plain_array():
    single, batch = both({"x": SMALL.view(InSharedMemory)})
    for out in [*single, *batch]:
        assert type(out["x"]) is np.ndarray
        assert (out["x"] == SMALL).all()


@pytest.mark.parametrize("array", [SMALL.view(np.matrix), RECORDS.view(np.recarray)])
def test_a_subclass_of_an_array_is_kept_alone_and_not_stacked(array):
    single, batch = both({"x": array})
    for out in single:
        assert type(out["x"]) is type(array) and (out["x"] == array).all()
        assert not out["x"].flags.writeable
    name = type(array).__name__
    message = refusal(batch)
    assert "item['x'] is a numpy" in message and name in message
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


@pytest.mark.parametrize(
    ("leaf", "parts"),
    [
        (np.ma.array([1, 2], mask=[0, 1]), ["masked array", "filled(value)"]),
        (np.ma.masked, ["masked array"]),
        (foreign("torch"), ["user.Parameter", ".numpy()"]),
        (foreign("pandas"), [".to_numpy()"]),
        (foreign("scipy"), [".toarray()"]),
        (Unregistered(SMALL), ["Unregistered", "tree_util.register_dataclass"]),
        (Attributes(SMALL), ["Attributes", "register_pytree_node"]),
        (Attributes(jnp.zeros(2)), ["Attributes", "cannot open"]),
        (deque([SMALL]), ["is a collections.deque, a container of arrays"]),
    ],
)
@pytest.mark.parametrize("batch", [0, 1])
def test_what_cannot_be_kept_is_refused_with_its_path(leaf, parts, batch):
    message = refusal(both({"a": [SMALL, leaf]})[batch])
    assert not [part for part in ["item['a'][1] is a ", *parts] if part not in message]


def test_a_sparse_matrix_is_refused():
    import scipy.sparse

    matrix = scipy.sparse.csr_array(np.eye(2))
    for echo in both([matrix]):
        assert "convert it with .toarray()" in refusal(echo)


def test_what_cannot_be_copied_is_refused():
    echo = both({"lock": threading.Lock()})[0]
    message = refusal(echo)
    assert "item['lock'] is a _thread.lock, which cannot be copied" in message


@pytest.mark.parametrize(
    "leaf",
    [
        pathlib.Path("a"),
        datetime.date(2024, 2, 29),
        Attributes([1, 2]),
        {1, 2},
        np.array([[1], [2, 3]], object),
        np.array([(1, [2])], [("id", "i4"), ("list", "O")]),
    ],
)
def test_objects_are_kept_alone_and_not_stacked(leaf):
    single, batch = both({"x": leaf})
    first, second = (out["x"] for out in single)
    assert type(first) is type(leaf)
    if isinstance(leaf, Attributes):
        assert vars(first) == vars(leaf) and first.things is not second.things
    elif isinstance(leaf, np.ndarray):
        assert first.tolist() == leaf.tolist()
    else:
        assert first == leaf
    assert "item['x'] is no array of numbers" in refusal(batch)


@pytest.mark.parametrize("text", ["ab\0", b"ab\0"])
def test_text_whose_end_would_be_lost_does_not_stack(text):
    single, batch = both({"x": text})
    assert [out["x"] for out in single] == [text, text]
    assert "item['x'] is text that ends with a NUL" in refusal(batch)


def test_ragged_items_do_not_stack():
    echo = ej.echo([[1, 2], [1]], ej.EchoSpec(batch_size=2), batch=True)
    assert "pad ragged lists" in refusal(echo)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"a": SMALL, "b": 1}, {"a": SMALL, "b": np.array([None])}),
        ({"a": SMALL, "b": 1}, {"a": SMALL, "b": 1.5}),
        ({"a": SMALL, "b": SMALL}, {"a": SMALL + 9, "b": SMALL[0]}),
        ([SMALL, 1], [SMALL, np.ma.array([1])]),
    ],
)
def test_a_ring_refuses_before_it_writes_or_decides(good, bad):
    store = RingStore(2)
    with pytest.raises(ValueError, match="item"):
        store.prepare([[good, np.ma.array([1])]])
    # The layout is this one's: nothing was decided before.
    put(store, 0, good)
    put(store, 1, good)
    before = repr(store.read(np.arange(2)))
    with pytest.raises(ValueError, match="item"):
        store.prepare([bad])
    assert repr(store.read(np.arange(2))) == before


def put(store, slot, *elements):
    """Writes elements, each whole, into the slots from one on."""
    taken = taken_of(store, elements)
    slots = np.arange(slot, slot + sum(end for _, _, end in taken))
    store.write(slots[None], taken)


def taken_of(store, elements):
    """Elements as a reader gives them, each whole."""
    return [taken for element in elements for taken in store.prepare([element])]


def test_a_ring_looks_at_a_stack_before_it_writes_it():
    store = RingStore(4, stacked=True)
    ((accepted, first, rows),) = store.prepare([{"a": np.arange(4)}])
    assert (first, rows) == (0, 4)
    for other in ({"a": np.arange(4.0)}, {"b": np.arange(4)}, [np.arange(4)]):
        with pytest.raises(ValueError, match="item"):
            store.prepare([other])
    store.write(np.array([[3, 0]]), [(accepted, 1, 3)])
    assert store.read(np.array([3, 0]))["a"].tolist() == [1, 2]


def test_a_restore_drops_the_rows_that_are_out_of_range():
    for store in (RingStore(2, stacked=True), RingStore(2), ItemStore(2)):
        is_ring = isinstance(store, RingStore)
        is_stacked = is_ring and store._stacked
        given = [np.arange(3)] if is_stacked else [np.int64(k) for k in range(3)]
        taken = taken_of(store, given)
        store.rewrite(np.array([[1, 2, 0]]), taken)
        found = store.read(np.arange(2)) if is_ring else map(store.read_one, range(2))
        assert [int(each) for each in found] == [2, 0]


def test_an_item_store_accepts_what_it_can_keep():
    store = ItemStore(1)
    put(store, 0, {"a": [SMALL, None], "path": pathlib.Path("a")})
    with pytest.raises(ValueError, match=r"item\['a'\]"):
        store.prepare([{"a": np.ma.array([1])}])
    assert store.read_one(0)["path"] == pathlib.Path("a")


def test_an_upstream_may_use_its_arrays_again_once_they_are_written():
    for store in (ItemStore(1), RingStore(1)):
        array = np.zeros(3)
        put(store, 0, {"x": array})
        array[:] = 7
        is_ring = isinstance(store, RingStore)
        out = store.read(np.array([0])) if is_ring else store.read_one(0)
        assert not out["x"].any()


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


@pytest.mark.parametrize(
    "options",
    [
        # Without a thread, what is read is used at once but for other items of a batch.
        {"prefetch": 0},
        {"prefetch": 2},
    ],
)
def test_batches_of_an_array_that_is_used_again_too_early_are_refused(options):
    echo = ej.echo(reusing(64), ej.EchoSpec(batch_size=12), batch=True, **options)
    with pytest.raises(ValueError, match="had already given away"):
        list(echo)


def test_items_of_grain_are_accepted():
    source = grain_source([{"x": np.int64(k), "name": "ab"} for k in range(4)])
    (batch,) = ej.echo(source, ej.EchoSpec(batch_size=4), batch=True)
    assert batch["x"].tolist() == [0, 1, 2, 3] and batch["name"].tolist() == ["ab"] * 4


def mesh_of(num_devices, kind=AxisType.Auto):
    devices = jax.devices()[:num_devices]
    return jax.make_mesh((num_devices,), ("data",), axis_types=(kind,), devices=devices)


def through_buffer(leaf, mesh):
    """Writes the rows of a batch into a buffer, and reads them back."""
    batch = {"x": leaf}
    lanes, rows = mesh.size, len(leaf) // mesh.size
    buffer = EchoBuffer.of(batch, num_slots=rows, mesh=mesh)
    slots = np.tile(np.arange(rows, dtype=np.int32), (lanes, 1))
    arrays = jitted_write(buffer)(buffer.init(), buffer.put(batch), slots)
    return jax.jit(buffer.read)(arrays, slots)["x"]


DEVICE_DTYPES = [
    "bool",
    "uint8",
    "int64",
    "uint64",
    "float16",
    "complex64",
    "bfloat16",
    "float8_e4m3fn",
    "int4",
]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("dtype", DEVICE_DTYPES)
def test_a_buffer_keeps_numbers_of_every_dtype(dtype, kind):
    rows = (np.arange(24).reshape(8, 3) % 3).astype(jnp.dtype(dtype))
    out = through_buffer(rows, mesh_of(2, kind))
    assert out.dtype == jax.dtypes.canonicalize_dtype(dtype)
    np.testing.assert_array_equal(np.asarray(out), rows)


@pytest.mark.parametrize("make", [np.zeros, jnp.zeros])
def test_a_buffer_takes_leaves_without_a_size(make):
    assert through_buffer(make((8, 0, 3), np.float32), mesh_of(4)).shape == (8, 0, 3)


def test_floats_of_64_bits_become_floats_of_32_as_in_jax():
    rows = np.linspace(0, 1, 8)
    out = through_buffer(rows, mesh_of(2))
    assert out.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(out), rows.astype(np.float32))


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_64_bits_stay_where_jax_has_them(dtype):
    rows = np.array([1, 2**62, 3, 2**62 + 2**10], dtype)
    with jax.enable_x64(True):
        out = through_buffer(rows, mesh_of(2))
        assert out.dtype == dtype
        np.testing.assert_array_equal(np.asarray(out), rows)


@pytest.mark.parametrize(
    ("dtype", "value", "name"),
    [
        ("int64", 2**31, "int32"),
        ("int64", -(2**31) - 1, "int32"),
        ("uint64", 2**32, "uint32"),
    ],
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
        (np.array([None, 1]), ["dtype object"]),
        (RECORDS, ["which devices do not have"]),
        (np.array(["2024-02-29"], "M8[D]"), ["datetime64[D]"]),
        (np.arange(2, dtype=">i4"), ["dtype >i4", "byte order"]),
        (np.zeros(2, np.longdouble), ["which devices do not have"]),
        (np.ma.array([1, 2]), ["masked array"]),
        (foreign("torch"), [".numpy()"]),
        (3, ["leading axis", "item['x'] is 3"]),
        (np.float32(3), ["leading axis"]),
        (Unregistered(SMALL), ["container that jax knows"]),
        (np.zeros((0, 3)), ["number of rows", "[0]"]),
        ([np.zeros(2), np.zeros(3)], ["number of rows", "[2, 3]"]),
        ([], ["number of rows", "[]"]),
    ],
)
def test_a_buffer_refuses_what_no_device_has(leaf, parts):
    with pytest.raises(ValueError) as caught:
        EchoBuffer.of({"x": leaf}, num_slots=2, mesh=mesh_of(1))
    assert not [part for part in parts if part not in str(caught.value)]


def test_a_buffer_says_how_random_keys_are_kept():
    with pytest.raises(ValueError, match=r"jax\.random\.key_data"):
        EchoBuffer.of(jax.random.split(jax.random.key(0)), num_slots=2, mesh=mesh_of(1))


def test_a_short_last_batch_is_refused_with_both_sizes_and_the_cure():
    def batches():
        yield {"x": np.arange(8, dtype=np.int32)}
        yield {"x": np.arange(4, dtype=np.int32)}

    spec = ej.EchoSpec(2, batch_size=8)
    echo = device.echo_batches(batches(), spec, mesh=mesh_of(2), prefetch=0)
    next(echo)
    next(echo)
    message = refusal(echo)
    assert "has 4 rows, the first one had 8" in message
    assert "drop_remainder=True" in message and "drop_last=True" in message


def test_buffers_of_one_layout_are_equal_and_hash_alike():
    batch = {"x": np.zeros((4, 2), np.float32)}
    one, other = (EchoBuffer.of(batch, num_slots=2, mesh=mesh_of(1)) for _ in "ab")
    assert one == other and hash(one) == hash(other)
    assert one.rows == 4


def test_an_explicit_mesh_gives_the_batches_of_an_automatic_one():
    def run(kind):
        fresh = ({"x": np.arange(8, dtype=np.int32) + 8 * k} for k in range(4))
        spec = ej.EchoSpec(2, 32, "spread", 8, 3)
        echo = device.echo_batches(fresh, spec, mesh=mesh_of(4, kind), prefetch=0)
        return [batch["x"] for batch in echo]

    explicit, automatic = run(AxisType.Explicit), run(AxisType.Auto)
    assert len(explicit) == 8
    assert [x.tolist() for x in explicit] == [x.tolist() for x in automatic]
    assert explicit[0].sharding.mesh.axis_types == (AxisType.Explicit,)


def test_an_explicit_mesh_is_told_how_what_goes_with_a_batch_is_split():
    batch = {"x": np.arange(8, dtype=np.int32)}
    buffer = EchoBuffer.of(batch, num_slots=2, mesh=mesh_of(4, AxisType.Explicit))

    @jax.jit
    def add(x, keys):
        return jax.vmap(lambda x, key: x + key[1])(x, buffer.split_rows(keys))

    keys = np.arange(16, dtype=np.int32).reshape(8, 2)
    assert add(buffer.put(batch)["x"], keys).tolist() == list(range(1, 25, 3))
