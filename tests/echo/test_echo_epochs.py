"""An echo ends with its loader, and goes through it again when it is iterated again."""

import itertools
import json
import threading
from dataclasses import replace

import grain
import jax
import numpy as np
import pytest

import echo_jax as ej
from echo_jax.echo.laws import CountingUpstream

ROWS = 4
WAIT_S = 4


class Gated:
    """A loader whose batches come when the test lets them; one pass for each `iter`."""

    def __init__(self, num_batches):
        self.num_batches, self.allowed = num_batches, threading.Semaphore(1)
        self.read, self.ended = 0, False
        self.moved = threading.Condition()

    def __iter__(self):
        for number in range(self.num_batches):
            assert self.allowed.acquire(timeout=WAIT_S)
            yield {"x": np.arange(ROWS) + ROWS * number}
            with self.moved:  # The reader asks for the next one, so it has this one.
                self.read += 1
                self.ended = number + 1 == self.num_batches
                self.moved.notify()

    def let(self):
        """Lets a batch come, and waits until it is read."""
        wanted = self.read + 1
        self.allowed.release()
        with self.moved:
            assert self.moved.wait_for(lambda: self.read >= wanted, WAIT_S)


def taken(batches, loader, every=1):
    """The batches of a pass; after every few of them another one is let."""
    outputs, left = [], loader.num_batches - 1
    for number in itertools.count(1):
        batch = next(batches, None)
        if batch is None:
            return outputs
        outputs.append(np.asarray(batch["x"]))
        waits = every > 1 and batches._driver.plan.need(ROWS).must
        if left and (waits or number % every == 0):
            left -= 1
            loader.let()


HOST = [
    ej.echo_batches,
    lambda loader, spec=None: iter(ej.grain.echo_batches(grained(loader), spec)),
]


class Stream(grain.IterDataset):
    def __init__(self, loader):
        super().__init__()
        self._loader = loader

    def __iter__(self):
        return StreamIterator(iter(self._loader))


class StreamIterator(grain.DatasetIterator):
    def __init__(self, items):
        super().__init__()
        self._items = items

    def __next__(self):
        return next(self._items)

    def get_state(self):
        return {}

    def set_state(self, state):
        raise NotImplementedError


def grained(loader):
    return Stream(loader)


def on_devices(loader, spec=None):
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    return ej.device.echo_batches(loader, spec, mesh=mesh)


@pytest.mark.parametrize("make", [*HOST, on_devices], ids=["host", "grain", "device"])
@pytest.mark.parametrize("num_batches", [1, 10, 100])
def test_a_loader_that_is_never_late_gives_its_own_batches(make, num_batches):
    loader = Gated(num_batches)
    outputs = taken(make(loader), loader)
    assert len(outputs) <= 1.02 * num_batches + 3
    first = [batch for batch in outputs if np.unique(batch).size == ROWS]
    assert {*np.concatenate(first).tolist()} == {*range(ROWS * num_batches)}
    # Once its first batches were there, all are the loader's own.
    if num_batches > 10:
        tail = np.concatenate(outputs[-num_batches // 2 :])
        np.testing.assert_array_equal(tail, np.arange(tail.size) + tail[0])


def test_a_long_loader_that_is_never_late_makes_no_more_updates():
    loader = Gated(1000)
    assert len(taken(ej.echo_batches(loader), loader)) <= 1.02 * 1000 + 3


@pytest.mark.parametrize("make", [*HOST, on_devices], ids=["host", "grain", "device"])
@pytest.mark.parametrize("ratio", [2, 4])
def test_at_most_one_batch_follows_the_last_fresh_one(make, ratio):
    loader = Gated(30)
    outputs = taken(make(loader), loader, every=ratio)
    assert len(outputs) > 20 * ratio
    has_last = [29 * ROWS in batch for batch in outputs]
    assert len(outputs) - has_last.index(True) <= 2


SEEDS = itertools.count()


class Restarted:
    """A loader with an iterator that keeps its state, or a loader that keeps it."""

    def __init__(self, num_items=10, of_loader=False):
        self.items = [{"x": np.arange(ROWS) + ROWS * k} for k in range(num_items)]
        self.passes, self.at, self.resumes, self.ended = 0, 0, False, 0
        if of_loader:
            # As torchdata's, it keeps the order of a pass, and not that of the next.
            self.random, self.order = np.random.default_rng(next(SEEDS)), []
            names = ("at", "passes", "ended", "order")
            self.state_dict = lambda: {name: getattr(self, name) for name in names}
            self.load_state_dict = self.load

    def load(self, state):
        self.passes, self.at = state["passes"], state["at"]
        self.resumes = not state["ended"]
        if self.resumes:
            self.order = state["order"]

    def __iter__(self):
        if not hasattr(self, "state_dict"):
            return CountingUpstream(self.items)
        if not self.resumes:
            self.passes, self.at = self.passes + 1, 0
            self.order = self.random.permutation(len(self.items)).tolist()
        self.resumes, self.ended = False, 0
        return self.rest()

    def rest(self):
        while self.at < len(self.items):
            self.at += 1
            yield self.items[self.order[self.at - 1]]
        self.ended = 1


def of_pass(batches):
    return [
        (np.asarray(x["x"]).tolist(), [*map(np.ndarray.tolist, t)]) for x, t in batches
    ]


FIXED = ej.EchoSpec("5/2", 24, "spread", ROWS, seed=1)
LOAD = ej.FetchSchedule(start=0.4, end=0.4)
STOCHASTIC = ej.StochasticSpec(LOAD, buffer=12, batch_size=ROWS, seed=2)
ADAPTIVE = ej.AdaptiveSpec(3, buffer=24, batch_size=ROWS, seed=1)
SPECS = {
    "fixed": FIXED,
    "shuffled": replace(FIXED, order="window_shuffle"),
    "piecewise": replace(FIXED, order="consecutive", buffer=1, factor={0: 1, 50: 3}),
    "stochastic": STOCHASTIC,
    "adaptive": ADAPTIVE,
    "adaptive-twice": replace(ADAPTIVE, min_uses=2, max_uses=4),
}
STORES = {
    "host": lambda loader, spec: ej.echo_batches(loader, spec, tags=True),
    "device": lambda loader, spec: ej.device.echo_batches(
        loader,
        spec,
        tags=True,
        mesh=jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]),
    ),
}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("of_loader", [False, True])
@pytest.mark.parametrize("mode", SPECS)
def test_a_state_of_any_epoch_resumes_to_the_bit(mode, of_loader, store):
    make, spec = STORES[store], SPECS[mode]
    if isinstance(spec, ej.AdaptiveSpec):
        echo = make(Restarted(of_loader=of_loader), spec)
        for _ in range(3):
            assert of_pass(echo)
        spec = replace(spec, replay=echo.log)
        echo.close()
    echo, outputs = make(Restarted(of_loader=of_loader), spec), []
    states, bounds = [], []
    for epoch in range(3):
        for batch in echo:
            outputs += of_pass([batch])
            states.append((len(outputs), epoch, echo.get_state(), False))
        states.append((len(outputs), epoch + 1, echo.get_state(), True))
        bounds.append(len(outputs))
    counts = echo.counts
    index = np.array([tags[0] for _, tags in outputs], object)
    used = np.bincount(np.concatenate([*index]).astype(int))
    assert used.size == counts.fresh == 3 * 10 * ROWS and used.sum() == counts.uses
    # `assert_echo_laws` restores at every output of an epoch.
    chosen = [each for at, each in enumerate(states) if at % 3 == 0 or each[-1]]
    for at, epoch, state, ended in chosen:
        again = make(Restarted(of_loader=of_loader), spec)
        again.set_state(json.loads(json.dumps(state)))
        rest = []
        for _ in range(epoch, 3):
            rest += of_pass(again)
        # A loader that keeps the order of one pass alone shuffles the next anew.
        passes = [state["epoch"]["upstream"], *dict(state["epoch"]["later"])]
        stop = bounds[epoch] if epoch in passes and not ended else at
        due = outputs[at : stop if of_loader else None]
        assert rest[: len(due)] == due, f"from output {at} in epoch {epoch}"
        assert [tags for _, tags in rest] == [tags for _, tags in outputs[at:]]
        assert again.counts == counts
        again.close()


@pytest.mark.parametrize("factor", [1, "5/2", {0: 1, 50: 3}])
def test_a_fixed_echo_makes_all_its_uses_in_each_epoch(factor):
    echo = ej.echo([*range(40)], ej.EchoSpec(factor, seed=1), tags=True)
    whole = ej.echo([*range(40)] * 2, ej.EchoSpec(factor), tags=True)
    for epoch in range(2):
        uses = [*echo]
        assert len(uses) == len(echo)
        assert all(item == tags.fresh_index - 40 * epoch for item, tags in uses)
    due = [tags.fresh_index for _, tags in whole]
    assert [tags.fresh_index for _, tags in uses] == [k for k in due if k >= 40]


def test_an_adaptive_echo_keeps_its_buffer_between_epochs():
    """No batch of the second epoch is there yet, and the step goes on."""
    loader = Gated(6)
    batches = ej.echo_batches(loader, ej.AdaptiveSpec(8, buffer=24, batch_size=ROWS))
    taken(batches, loader)
    again = iter(batches)
    repeats = [next(again)["x"] for _ in range(3)]
    assert batches.counts.fresh == 6 * ROWS and np.size(repeats) == 12
    loader.allowed.release(6)
    assert len([*again]) >= 6 and batches.counts.fresh == 12 * ROWS


def test_a_loop_that_was_left_goes_on():
    echo = ej.echo_batches(Restarted(), ej.EchoSpec(2, batch_size=ROWS))
    assert len([*itertools.islice(echo, 7)]) == 7
    assert len([*echo]) == 13
    assert len([*echo]) == 20


def test_a_damaged_epoch_is_refused():
    echo = ej.echo_batches(Restarted(), FIXED)
    next(echo)
    state = echo.get_state()
    for bad in (
        3,
        {"number": -1},
        {"uses": -1},
        {"more": 1},
        {"number": 1.0},
        {"upstream": 1},
    ):
        with pytest.raises(ValueError, match="damaged"):
            echo.set_state(
                {**state, "epoch": bad if bad == 3 else state["epoch"] | bad}
            )


def test_each_epoch_has_an_order_of_its_own():
    echo = ej.echo_batches(Restarted(), SPECS["shuffled"], tags=True)
    first, second = ([*np.concatenate([t[0] for _, t in echo])] for _ in range(2))
    assert sorted(first) == sorted(k - 40 for k in second)
    assert first != [k - 40 for k in second]
