"""Cases that people reported of other loaders and trainers, tried on an echo."""

import copy
import os
import pickle
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import echo_jax as ej

ROWS = 8
HOST = [ej.echo_batches]
BOTH = [ej.echo_batches, ej.device.echo_batches]


class Refilled:
    """Refills a few arrays in rotation; every image has an equal border."""

    def __init__(self, buffers, num_batches):
        self.buffers, self.num_batches = buffers, num_batches

    def __iter__(self):
        images = np.zeros((self.buffers, ROWS, 40, 40), np.float32)
        labels = np.zeros((self.buffers, ROWS), np.int32)
        for number in range(self.num_batches):
            image, label = images[number % self.buffers], labels[number % self.buffers]
            label[:] = np.arange(number * ROWS, (number + 1) * ROWS)
            image[:, 15:25, 15:25] = label[:, None, None]
            yield {"image": image, "label": label}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("make", BOTH)
def test_a_loader_may_refill_its_arrays(make, buffers, prefetch):
    spec = ej.EchoSpec(2, buffer=64, batch_size=16)
    seen = 0
    for batch in make(Refilled(buffers, 40), spec, prefetch=prefetch):
        image, label = np.asarray(batch["image"]), np.asarray(batch["label"])
        np.testing.assert_array_equal(image[:, 20, 20], label)
        seen += label.size
    assert seen == 2 * 40 * ROWS


def examples(batches):
    for batch in batches:
        for row in range(ROWS):
            yield {name: x[row] for name, x in batch.items()}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loader_of_examples_may_refill_its_arrays(prefetch):
    spec = ej.EchoSpec(2, order="spread", buffer=64, batch_size=16)
    items = examples(Refilled(2, 40))
    for batch in ej.echo(items, spec, batch=True, prefetch=prefetch):
        np.testing.assert_array_equal(batch["image"][:, 20, 20], batch["label"])


def test_a_loader_may_donate_the_arrays_that_it_gave():
    made = jax.jit(lambda x: x + ROWS, donate_argnums=0)

    def loader():
        x = jnp.arange(ROWS)
        for _ in range(20):
            yield {"x": x}
            x = made(x)

    spec = ej.EchoSpec(2, order="consecutive")
    for make in BOTH:
        lanes = {} if make is ej.echo_batches else {"mesh": jax.make_mesh((1,), "x")}
        found = [np.asarray(b["x"]) for b in make(loader(), spec, **lanes)]
        np.testing.assert_array_equal(
            np.bincount(np.concatenate(found)), np.full(20 * ROWS, 2)
        )


def test_a_step_that_donates_an_item_is_told_so():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    echo = ej.echo([jnp.arange(3) + k for k in range(3)], ej.EchoSpec(2))
    step(next(echo))
    with pytest.raises(ValueError, match=r"int32\[3\] of an item was donated"):
        next(echo)


# 1 and 15: what a loader gives in place of batches.


@struct.dataclass
class Graph:
    nodes: np.ndarray
    edges: np.ndarray


def graph(nodes=ROWS, edges=ROWS):
    return Graph(np.zeros((nodes, 2)), np.zeros((edges, 3)))


IMAGES = np.zeros((ROWS, 4, 4), np.float32)
REFUSED = [
    ([np.arange(5)] * ROWS, r"item is a list of 8 arrays .*chain\.from_iterable"),
    ([np.arange(5), np.arange(7)], r"item is a list of 2 arrays"),
    ({"x": [np.zeros((5, 2)), np.zeros((5, 2))]}, r"item\['x'\] is a list of 2"),
    ([graph()] * 3, r"item is a list of 3 .* have the loader give a tuple"),
    ({"x": [1, 2], "y": [3, 4]}, r"item\['x'\] is a list of numbers.*with_format"),
    ({"x": [[1, 2], [3, 4]]}, r"item\['x'\] is a list of numbers"),
    (["a", "b"], r"item is a list of numbers or texts, \['a', 'b'\]"),
    ({"x": IMAGES, "epoch": 3}, r"item\['epoch'\] is one value .* np\.full\(8, value"),
    ({"x": IMAGES, "split": "train"}, r"item\['split'\] is one value for a batch"),
    (
        {"x": IMAGES, "y": np.arange(ROWS), "weights": np.ones(10)},
        r"item\['weights'\] has 10 rows, and item\['x'\] has 8.* class weights",
    ),
    (graph(edges=20), r"has 20 rows, .* repeat whole batches: ej\.echo\(loader, spec"),
    ({"x": np.float32(1), "y": 2}, r"have none.*yields examples, use ej\.echo\(exam"),
]


@pytest.mark.parametrize(("batch", "message"), REFUSED, ids=lambda x: str(x)[:30])
@pytest.mark.parametrize("make", BOTH)
def test_what_is_no_batch_is_told_its_leaf_and_the_fix(make, batch, message):
    with pytest.raises(ValueError, match=message):
        next(make([batch] * 4, ej.EchoSpec(2)))


class Stated(list):
    """A loader that states its batch size, as torch's does."""

    batch_size = ROWS


PAIR = [np.arange(ROWS), np.arange(ROWS) + 1]  # torch gives lists for pairs


@pytest.mark.parametrize("make", BOTH)
def test_leaves_in_a_list_are_known_by_the_loaders_batch_size_or_their_shapes(make):
    lanes = {} if make is ej.echo_batches else {"num_lanes": ROWS}
    spec = ej.EchoSpec(2, order="consecutive")
    for loader in (Stated([PAIR] * 3), [[IMAGES, np.arange(ROWS)]] * 3, [(*PAIR,)] * 3):
        first = next(make(loader, spec, **lanes))
        assert type(first) is type(loader[0])
        assert [len(leaf) for leaf in first] == [ROWS, ROWS]
    # As many as a batch has rows: the batch size does not tell which they are.
    with pytest.raises(ValueError, match="a list of 8 arrays"):
        next(make(Stated([[np.arange(ROWS)] * ROWS] * 3), spec, **lanes))


def test_lists_of_numbers_are_no_items_that_stack():
    spec = ej.EchoSpec(2, batch_size=2)
    rows = [{"tokens": [1, 2, 3], "label": 0}] * 4
    with pytest.raises(ValueError, match=r"item\['tokens'\] is a list of numbers"):
        next(ej.echo(rows, spec, batch=True))
    assert next(ej.echo(rows, spec)) == rows[0]


class Table:
    """As a data frame, or a table of Arrow."""

    columns = ("id", "price")

    def __array__(self, *args, **options):
        return np.zeros((ROWS, 2))


class Column:
    """As a column of Arrow with a missing value."""

    null_count = 1

    def __array__(self, *args, **options):
        return np.array([float(2**53), float("nan")])


class Nullable(Column):
    """As a column of pandas with a missing value."""

    null_count, dtype = 0, "Int64"

    def isna(self):
        return np.array([False, True])


@pytest.mark.parametrize("make", BOTH)
def test_tables_and_missing_values_are_refused(make):
    with pytest.raises(ValueError, match=r"is a table. Give a dict .*'id', 'price'"):
        next(make([Table()] * 2, ej.EchoSpec(2)))
    for column in (Column(), Nullable()):
        with pytest.raises(ValueError, match=r"item\['id'\] has 1 missing values"):
            next(make([{"id": column}] * 2, ej.EchoSpec(2)))


def test_a_small_first_batch_does_not_choose_the_batch_size():
    sizes = [3, *[32] * 4]
    loader = [{"x": np.arange(size)} for size in sizes]
    with pytest.raises(ValueError, match=r"first batch has 3 rows.*batch_size=32"):
        [*ej.echo_batches(loader)]
    for spec in (ej.AdaptiveSpec(batch_size=32), ej.EchoSpec(2, batch_size=3)):
        assert [*ej.echo_batches(loader, spec)]
    # Those that differ a little do no harm.
    assert [*ej.echo_batches([{"x": np.arange(size)} for size in (32, 31, 32)])]


# 9, 12 and 13: processes, states and the end of Python.


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_an_echo_that_reads_ahead_says_so_in_a_forked_process():
    loader = [{"x": np.arange(4)} for _ in range(50)]
    echo = ej.echo_batches(loader, ej.EchoSpec(2), prefetch=2)
    next(echo)
    child = os.fork()
    if not child:
        signal.alarm(20)  # It would hang.
        try:
            list(echo)
        except RuntimeError as error:
            os._exit(0 if "spawn" in str(error) else 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert len([*echo]) == 99


class Refuses(list):
    """Its state takes an argument, or is there and fails."""

    def state_dict(self, num_samples):
        return {}

    def load_state_dict(self, state):
        raise NotImplementedError


class Fails(Refuses):
    def state_dict(self):
        raise NotImplementedError("not for this dataset")


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize(
    ("kind", "words"),
    [(Refuses, "a Refuses.*num_samples"), (Fails, "a Fails.*not for this dataset")],
)
def test_a_loader_that_refuses_its_state_is_echoed_without_one(
    kind, words, make, prefetch
):
    loader = kind([{"x": np.arange(ROWS)} for _ in range(4)])
    spec = ej.EchoSpec(2, order="consecutive")
    echo = make(loader, spec, prefetch=prefetch)
    for _ in range(2):  # two epochs
        assert len([*echo]) == 8
    with pytest.raises(TypeError, match=words):
        echo.get_state()


def test_a_loader_of_several_devices_is_named_if_it_has_no_state():
    echo = ej.device.echo_batches(batch for batch in [{"x": np.arange(ROWS)}] * 3)
    with pytest.raises(TypeError, match="a generator, has no get_state"):
        echo.get_state()


def test_python_ends_in_silence_while_an_echo_is_a_global():
    code = """if True:
        import grain, numpy as np, echo_jax as ej
        dataset = grain.MapDataset.range(64).batch(8).to_iter_dataset()
        for make in (ej.echo_batches, ej.grain.echo_batches):
            echo = iter(make(dataset, ej.EchoSpec(2)))
            ahead = iter(make(dataset, ej.AdaptiveSpec()))
            next(echo), next(ahead)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("make", BOTH)
def test_an_echo_is_not_copied(make, copied):
    echo = make([{"x": np.arange(ROWS)}] * 3, ej.EchoSpec(2))
    with pytest.raises(TypeError, match="an echo is not copied or pickled"):
        copied(echo)


def test_random_keys_are_finite():
    items = [{"key": jax.random.key(0), "x": 1.0}, {"key": jax.random.key(1), "x": 2.0}]
    assert [item["x"] for item in ej.check_finite(items)] == [1.0, 2.0]


def test_a_probed_step_that_writes_into_its_batch_is_told_so():
    def step(batch):
        batch["x"] -= 1
        return batch["x"].sum()

    with pytest.raises(ValueError, match="writes into its batch, which an echo uses"):
        ej.probe([{"x": np.zeros(4)}] * 50, step, seconds=0.1)
