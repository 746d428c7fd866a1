"""Adaptive draws: the rule holds exactly, is recorded, replayed and restored."""

import copy
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_jax.echo.plans.adaptive import AdaptiveDraws
from echo_jax.echo.plans.decision_log import Tape
from echo_jax.echo.plans.draws import Need


class Driver:
    """Drives draws as a feed does, keeps the store, and checks every law."""

    def __init__(self, draws, arguments):
        self.draws = draws
        self.lanes = arguments.get("num_lanes", 1)
        self.rows = arguments["chunk_items"] // self.lanes
        self.batch = arguments["batch_size"] // self.lanes
        self.cap = arguments.get("cap", 4)
        self.store = [{} for _ in range(self.lanes)]  # slot -> fresh index
        self.uses = {}
        self.chunks = 0

    def put(self, chunk, slots):
        for lane in range(self.lanes):
            for row, slot in enumerate(slots[lane].tolist()):
                index = (chunk * self.lanes + lane) * self.rows + row
                if slot < self.draws.num_slots:
                    self.store[lane][slot] = index

    def write(self):
        before = [dict(slots) for slots in self.store]
        slots = self.draws.write()
        assert slots.dtype == np.int32 and slots.shape == (self.lanes, self.rows)
        self.put(self.chunks, slots)
        self.chunks += 1
        for lane in range(self.lanes):
            gone = set(before[lane].values()) - set(self.store[lane].values())
            assert all(self.uses[index] >= 1 for index in gone), "lost unused"
            self.uses |= {i: self.uses.get(i, 0) for i in self.store[lane].values()}

    def draw(self):
        draw = self.draws.draw()
        if draw is None:
            return None
        assert draw.read_slots.dtype == draw.repeat.dtype == np.int32
        assert draw.fresh_index.dtype == np.int64
        for lane in range(self.lanes):
            slots, index, repeat = (
                part[lane].tolist()
                for part in (draw.read_slots, draw.fresh_index, draw.repeat)
            )
            assert len(set(index)) == self.batch, "an item twice in a batch"
            assert [self.store[lane][slot] for slot in slots] == index
            assert [self.uses[i] for i in index] == repeat
            self.check_choice(lane, index)
            assert max(repeat) < self.cap, "used beyond the cap"
            for i in index:
                self.uses[i] += 1
        return [part.tolist() for part in (draw.fresh_index, draw.repeat)]

    def check_choice(self, lane, index):
        """Fresh items go first and in their order; nothing else is drawn unused."""
        fresh = sorted(i for i in self.store[lane].values() if not self.uses[i])
        assert index[: len(fresh)] == fresh[: self.batch], "fresh items are not first"

    def step(self, ready):
        """Draws as a feed does."""
        need = self.draws.need()
        if need is Need.MUST or (need is Need.MAY and ready):
            self.write()
            assert self.draws.need() is Need.NO
        return self.draw()


@st.composite
def arguments(draw):
    lanes = draw(st.integers(1, 3))
    batch = draw(st.integers(1, 6))
    rows = batch + draw(st.integers(0, 7))
    least = batch - np.gcd(batch, rows) + rows
    return {
        "buffer": lanes * int(least + draw(st.integers(0, 40))),
        "batch_size": lanes * batch,
        "chunk_items": lanes * rows,
        "num_lanes": lanes,
        "cap": draw(st.integers(1, 5)),
        "seed": draw(st.integers(0, 3)),
    }


# Runs of readiness, so that buffers both fill up and are used up.
READINESS = st.lists(
    st.tuples(st.booleans(), st.integers(1, 25)), min_size=1, max_size=6
).map(lambda runs: [ready for ready, length in runs for _ in range(length)])


@settings(max_examples=150, deadline=None)
@given(arguments(), READINESS)
def test_the_rule_holds_at_every_draw(args, readiness):
    """`Driver` checks cap, twins, least use, tags, and that none is lost unused."""
    driver = Driver(AdaptiveDraws(**args), args)
    for ready in readiness:
        driver.step(ready)
    driver.draws.end()
    while driver.draw():
        assert driver.draws.need() is Need.NO
    left = [
        sum(driver.uses[i] < driver.cap for i in slots.values())
        for slots in driver.store
    ]
    assert min(left) < driver.batch
    assert driver.draws.draw() is None
    counts = driver.draws.counts
    assert counts.fresh == len(driver.uses) == driver.chunks * args["chunk_items"]
    assert counts.uses == sum(driver.uses.values())
    assert counts.repeats == sum(max(0, n - 1) for n in driver.uses.values())


@settings(max_examples=60, deadline=None)
@given(arguments(), READINESS, st.randoms(use_true_random=False))
def test_a_tape_repeats_the_run_whatever_is_ready(args, readiness, random):
    first = Driver(AdaptiveDraws(**args), args)
    sequence = [first.step(ready) for ready in readiness]
    tape = Tape.from_json(json.loads(json.dumps(first.draws.tape.to_json())))
    again = Driver(AdaptiveDraws(**args, replay=tape), args)
    assert [again.step(random.random() < 0.5) for _ in readiness] == sequence
    assert again.draws.tape == first.draws.tape
    # After its end both go on alike from what is ready.
    for _ in range(20):
        ready = random.random() < 0.5
        assert first.step(ready) == again.step(ready)


def saved(driver):
    state = json.dumps(driver.draws.get_state())
    return state, driver.draws.counts, copy.deepcopy(driver.store)


@settings(max_examples=25, deadline=None)
@given(arguments(), READINESS, st.booleans())
def test_a_restore_at_every_draw_goes_on_the_same(args, readiness, between):
    """The state is taken before the write of a draw, or between write and draw."""
    readiness = readiness[:40]
    driver = Driver(AdaptiveDraws(**args), args)
    states, drawn = [], []
    for ready in readiness:
        if not between:
            states.append(saved(driver))
        need = driver.draws.need()
        if need is Need.MUST or (need is Need.MAY and ready):
            driver.write()
        if between:
            states.append(saved(driver))
        drawn.append(driver.draw())
    for at, (state, counts, store) in enumerate(states):
        restored = Driver(AdaptiveDraws(**args, replay=driver.draws.tape), args)
        held = restored.draws.set_state(json.loads(state))
        chunks = [chunk for chunk, _ in held]
        first, last = restored.draws.first_chunk, restored.draws.num_chunks
        assert chunks == list(range(first, last))
        for chunk, slots in held:
            restored.put(chunk, slots)
        restored.chunks = last
        assert restored.store == store
        assert restored.draws.counts == counts
        stored = {i for slots in restored.store for i in slots.values()}
        restored.uses = dict.fromkeys(stored, 0)
        for index, _ in drawn[:at]:
            for i in np.ravel(index).tolist():
                if i in stored:
                    restored.uses[i] += 1
        for expected in drawn[at : at + 12]:
            assert restored.step(ready=False) == expected


def test_a_small_case_by_hand():
    """Two lanes of one item: fresh, echo of the older, wait at the cap."""
    args = {"buffer": 4, "batch_size": 2, "chunk_items": 2, "num_lanes": 2, "cap": 2}
    driver = Driver(AdaptiveDraws(**args), args)
    assert driver.draws.need() is Need.MUST
    assert driver.step(True) == [[[0], [1]], [[0], [0]]]
    assert driver.draws.need() is Need.MAY
    assert driver.step(True) == [[[2], [3]], [[0], [0]]]
    assert driver.step(False) == [[[0], [1]], [[1], [1]]]
    assert driver.step(False) == [[[2], [3]], [[1], [1]]]
    assert driver.draws.need() is Need.MUST
    assert driver.draws.write().tolist() == [[0], [0]]
    assert list(driver.draws.tape) == [True, True, False, False]


def test_a_stall_uses_all_items_up_to_the_cap_and_far_apart():
    """64 items in 16 batches, then no more data until every item is at the cap."""
    args = {"buffer": 64, "batch_size": 4, "chunk_items": 4, "cap": 4}
    driver = Driver(AdaptiveDraws(**args), args)
    drawn = [driver.step(True) for _ in range(16)]
    while driver.draws.need() is Need.MAY:
        drawn.append(driver.step(False))
    assert driver.draws.need() is Need.MUST
    # What is left at the end is too few for a batch.
    below = [item for item, uses in driver.uses.items() if uses < 4]
    assert len(below) < 4
    assert len(drawn) * 4 == sum(driver.uses.values()) > 64 * 4 - 3 * 3
    index = np.array([np.ravel(batch) for batch, _ in drawn])
    # While all may still be used, the queue is 16 batches: 12 are behind its front.
    early = index[:40]
    when = [np.flatnonzero((early == item).any(1)) for item in range(64)]
    assert min(np.concatenate([np.diff(times) for times in when])) >= 12
    # Neighbours part: most batches of the first echo come from three or more.
    origins = [len(set((batch // 4).tolist())) for batch in index[16:32]]
    assert np.mean(origins) > 2.5


@pytest.mark.parametrize("ratio", [1.5, 2.0, 3.2])
def test_repeats_of_a_slow_constant_stream_lie_far_apart(ratio):
    """At R below the cap: the whole buffer takes turns, not what has just come."""
    batch, chunks = 8, 64
    args = {"buffer": chunks * batch, "batch_size": batch, "chunk_items": batch}
    driver = Driver(AdaptiveDraws(**args), args)
    last, lags = {}, []
    arrived, taken = 0.0, 0
    for number in range(int(12 * chunks * ratio)):
        arrived += 1 / ratio
        for item in np.ravel(driver.step(arrived - taken >= 1)[0]).tolist():
            lags.append(number - last.get(item, number))
            last[item] = number
        taken = driver.chunks
    assert driver.chunks >= 12 * chunks - 1, "data that was ready was not taken"
    settled = np.array(lags[len(lags) // 2 :])
    settled = settled[settled > 0]
    assert np.quantile(settled, 0.1) > chunks / 2
    # No item is used often while another is hardly used.
    uses = [n for item, n in driver.uses.items() if item < 10 * chunks * batch]
    assert np.std(uses) < 0.75


def test_lanes_choose_for_themselves():
    args = {"buffer": 128, "batch_size": 8, "chunk_items": 8, "num_lanes": 2}
    driver = Driver(AdaptiveDraws(**args), args)
    drawn = [driver.step(i < 16) for i in range(32)]
    lanes = np.array([index for index, _ in drawn])[16:]
    assert not np.array_equal(lanes[:, 0] % 4, lanes[:, 1] % 4)
    other = Driver(AdaptiveDraws(**args, seed=1), args)
    assert drawn[16:] != [other.step(i < 16) for i in range(32)][16:]


def test_nothing_is_echoed_while_data_comes_in_time():
    args = {"buffer": 40, "batch_size": 4, "chunk_items": 6}
    driver = Driver(AdaptiveDraws(**args), args)
    drawn = [driver.step(True)[0][0] for _ in range(30)]
    assert np.ravel(drawn).tolist() == list(range(120))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_lanes": 3}, "not a multiple of num_lanes=3"),
        ({"cap": 0}, "cap=0 must be at least 1"),
        ({"chunk_items": 6}, "chunk_items=6 is too small: .* use at least 8"),
        ({"buffer": 7}, "buffer=7 is too small .* use at least 8"),
        ({"buffer": 16, "chunk_items": 12}, "use at least 16"),
    ],
)
def test_what_cannot_work_is_refused(changes, message):
    args = {"buffer": 64, "batch_size": 8, "chunk_items": 8, "num_lanes": 2}
    if message == "use at least 16":
        AdaptiveDraws(**args | changes)
        changes = changes | {"buffer": 15}
    with pytest.raises(ValueError, match=message):
        AdaptiveDraws(**args | changes)


def test_a_driver_that_does_not_ask_is_told():
    draws = AdaptiveDraws(buffer=8, batch_size=2, chunk_items=2)
    with pytest.raises(RuntimeError, match=re.escape("ask need() before draw()")):
        draws.draw()
    draws.write()
    with pytest.raises(RuntimeError, match=re.escape("ask need() before write()")):
        draws.write()
    with pytest.raises(ValueError, match="at most max_draws=1"):
        draws.need(2)


def test_a_tape_of_another_run_is_refused():
    args = {"buffer": 8, "batch_size": 2, "chunk_items": 2, "cap": 2}
    with pytest.raises(ValueError, match="takes no chunk before draw 0"):
        AdaptiveDraws(**args, replay=Tape([False])).need()
    short = AdaptiveDraws(**args, replay=Tape([True, True]))
    short.write()
    short.draw()
    with pytest.raises(RuntimeError, match="the tape takes a chunk here"):
        short.draw()
    short.end()
    with pytest.raises(ValueError, match="takes chunk 1 before draw 1"):
        short.draw()


def test_a_state_of_another_echo_is_refused():
    args = {"buffer": 8, "batch_size": 2, "chunk_items": 2}
    draws = AdaptiveDraws(**args)
    draws.write()
    draws.draw()
    state = draws.get_state()
    assert json.loads(json.dumps(state)) == state
    with pytest.raises(ValueError, match="give what get_state returned"):
        AdaptiveDraws(**args).set_state(state | {"more": 0})
    with pytest.raises(ValueError, match="give what get_state returned"):
        AdaptiveDraws(**args).set_state(state | {"chunks": 1.0})
    with pytest.raises(ValueError, match="another buffer"):
        AdaptiveDraws(**args, seed=1).set_state(state)
    with pytest.raises(ValueError, match="says 3 chunks"):
        AdaptiveDraws(**args).set_state(state | {"chunks": 3})
    with pytest.raises(ValueError, match="takes too few chunks"):
        AdaptiveDraws(**args).set_state(state | {"tape": Tape([False]).to_json()})
    with pytest.raises(ValueError, match="not on the way of the tape"):
        AdaptiveDraws(**args, replay=Tape([False])).set_state(state)


def test_an_ended_stream_is_restored_as_ended():
    args = {"buffer": 8, "batch_size": 2, "chunk_items": 2, "cap": 2}
    draws = AdaptiveDraws(**args)
    draws.write()
    draws.draw()
    draws.end()
    restored = AdaptiveDraws(**args)
    restored.set_state(draws.get_state())
    assert restored.need() is Need.NO
    assert restored.draw().repeat.tolist() == [[1, 1]]
    assert restored.draw() is None
