"""Adaptive plans: the rule holds exactly, is recorded, replayed and restored."""

import copy
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_jax.echo.counts import Counts
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.plans.adaptive import AdaptivePlan
from echo_jax.echo.plans.base import Need
from echo_jax.echo.plans.lanes import Lanes
from echo_jax.echo.spec import AdaptiveSpec


def make(args, replay=None, **options):
    """A plan of arguments as `arguments` draws them."""
    args = dict(args)
    lanes = Lanes(args.pop("host_batch"), args.pop("num_lanes", 1))
    return AdaptivePlan(AdaptiveSpec(**args, replay=replay), lanes=lanes, **options)


class Driver:
    """Drives a plan as a feed does, keeps the store, and checks every law."""

    def __init__(self, plan, arguments):
        self.plan = plan
        self.lanes = arguments.get("num_lanes", 1)
        self.lane_rows = arguments["host_batch"] // self.lanes
        self.batch = arguments["batch_size"] // self.lanes
        assert plan.batch == plan.unit == self.batch
        self.cap = arguments.get("cap", 4)
        self.store = [{} for _ in range(self.lanes)]  # slot -> fresh index
        self.uses = {}
        self.rows = 0
        self.ended = False
        self.size = self.batch  # of the latest batch

    @property
    def host_batches(self):
        return self.rows // self.lane_rows

    def put(self, first, slots):
        for lane in range(self.lanes):
            for row, slot in enumerate(slots[lane].tolist(), first):
                number, place = divmod(row, self.lane_rows)
                index = (number * self.lanes + lane) * self.lane_rows + place
                if slot < self.plan.num_slots:
                    self.store[lane][slot] = index

    def write(self, rows):
        before = [dict(slots) for slots in self.store]
        slots = self.plan.write(rows)
        assert slots.dtype == np.int32 and slots.shape == (self.lanes, rows)
        assert rows == self.lane_rows or self.ended
        self.put(self.rows, slots)
        self.rows += rows
        for lane in range(self.lanes):
            gone = set(before[lane].values()) - set(self.store[lane].values())
            assert all(self.uses[index] >= 1 for index in gone), "lost unused"
            self.uses |= {i: self.uses.get(i, 0) for i in self.store[lane].values()}

    def draw(self):
        batch = self.plan.next(self.batch)
        if batch is None:
            return None
        assert batch.slots.dtype == batch.repeat.dtype == np.int32
        assert batch.fresh_index.dtype == np.int64
        assert batch.last is None
        size = batch.repeat.shape[1]
        drawable = [
            sum(self.uses[i] < self.cap for i in slots.values()) for slots in self.store
        ]
        assert size == min(self.batch, *drawable) <= self.size
        assert size == self.batch or self.ended
        self.size = size
        for lane in range(self.lanes):
            slots, index, repeat = (
                part[lane].tolist()
                for part in (batch.slots, batch.fresh_index, batch.repeat)
            )
            assert len(set(index)) == size, "an item twice in a batch"
            assert [self.store[lane][slot] for slot in slots] == index
            assert [self.uses[i] for i in index] == repeat
            self.check_choice(lane, index)
            assert max(repeat) < self.cap, "used beyond the cap"
            for i in index:
                self.uses[i] += 1
        return [part.tolist() for part in (batch.fresh_index, batch.repeat)]

    def check_choice(self, lane, index):
        """Fresh items go first and in their order; nothing else is drawn unused."""
        fresh = sorted(i for i in self.store[lane].values() if not self.uses[i])
        assert index[: len(fresh)] == fresh[: self.batch], "fresh items are not first"

    def step(self, ready):
        """Draws as a feed does."""
        need = self.plan.need(self.batch)
        assert not (need.must and need.may)
        rows = need.must or (need.may if ready else 0)
        if rows:
            self.write(rows)
            assert self.plan.need(self.batch) == Need()
        return self.draw()

    def end(self, rows=0):
        self.plan.end(rows)
        self.ended = True

    def restored(self, state, replay, arguments):
        """A driver of a new plan that goes on from a state; and what is pending."""
        other = Driver(make(arguments, replay), arguments)
        other.plan.check_state(state)
        assert other.plan.counts() == Counts(), "check_state has changed something"
        restored = other.plan.set_state(state)
        assert restored.first == other.plan.anchor()
        assert restored.first % self.lane_rows == 0
        assert restored.slots.dtype == np.int32
        other.rows = restored.first + restored.slots.shape[1]
        other.put(restored.first, restored.slots)
        stored = {i for slots in other.store for i in slots.values()}
        other.uses = dict.fromkeys(stored, 0)
        return other, restored.pending


@st.composite
def arguments(draw):
    lanes = draw(st.integers(1, 3))
    batch = draw(st.integers(1, 6))
    rows = batch + draw(st.integers(0, 7))
    least = batch - np.gcd(batch, rows) + rows
    return {
        "buffer": lanes * int(least + draw(st.integers(0, 40))),
        "batch_size": lanes * batch,
        "host_batch": lanes * rows,
        "num_lanes": lanes,
        "cap": draw(st.integers(1, 5)),
        "seed": draw(st.integers(0, 3)),
    }


# Runs of readiness, so that buffers both fill up and are used up.
READINESS = st.lists(
    st.tuples(st.booleans(), st.integers(1, 25)), min_size=1, max_size=6
).map(lambda runs: [ready for ready, length in runs for _ in range(length)])


@settings(max_examples=150)
@given(arguments(), READINESS, st.integers(0, 12), st.booleans())
def test_the_rule_holds_at_every_draw(args, readiness, left, ready_to_the_end):
    """`Driver` checks cap, twins, least use, tags, and that none is lost unused."""
    driver = Driver(make(args), args)
    for ready in readiness:
        driver.step(ready)
    left %= driver.lane_rows
    expected_rows = driver.rows + left
    driver.end(left)
    while driver.step(ready_to_the_end):
        if driver.rows == expected_rows:
            assert driver.plan.need(driver.batch) == Need()
    # All that came was taken, and in some lane every item is at the cap.
    assert driver.rows == expected_rows
    assert 0 in [
        sum(driver.uses[i] < driver.cap for i in slots.values())
        for slots in driver.store
    ]
    assert driver.plan.next(driver.batch) is None
    counts = driver.plan.counts()
    assert counts.fresh == len(driver.uses) == driver.rows * driver.lanes
    assert counts.uses == sum(driver.uses.values())
    assert counts.repeats == sum(max(0, n - 1) for n in driver.uses.values())


@settings(max_examples=60)
@given(arguments(), READINESS, st.randoms(use_true_random=False))
def test_a_log_repeats_the_run_whatever_is_ready(args, readiness, random):
    first = Driver(make(args), args)
    sequence = [first.step(ready) for ready in readiness]
    log = DecisionLog.from_json(json.loads(json.dumps(first.plan.log.to_json())))
    again = Driver(make(args, log), args)
    assert [again.step(random.random() < 0.5) for _ in readiness] == sequence
    assert again.plan.log == first.plan.log
    # After its end both go on alike from what is ready.
    for _ in range(20):
        ready = random.random() < 0.5
        assert first.step(ready) == again.step(ready)


@settings(max_examples=25)
@given(arguments(), READINESS, st.integers(0, 12), st.integers(0, 5))
def test_a_restore_at_every_draw_goes_on_the_same(args, readiness, left, pending):
    """Also with uses of the latest batch that were not handed out, and at the end."""
    readiness = readiness[:40]
    driver = Driver(make(args), args)
    states, drawn = [], []
    for number, ready in enumerate([*readiness, *[True] * 8]):
        held = min(pending, len(drawn[-1][0][0]) - 1) if drawn else 0
        state = json.dumps(driver.plan.get_state(held))
        states.append((state, driver.plan.counts(), copy.deepcopy(driver.store), held))
        if number == len(readiness):
            driver.end(left % driver.lane_rows)
        batch = driver.step(ready)
        if batch is None:
            break
        drawn.append(batch)
    total = driver.rows
    for at, (state, counts, store, held) in enumerate(states):
        replay = driver.plan.log
        restored, rest = driver.restored(json.loads(state), replay, args)
        assert restored.store == store
        assert restored.plan.counts() == counts
        if held:
            # Uses are handed out one by one where there is one lane.
            index, repeat = (part[0][-held:] for part in drawn[at - 1])
            slots, *found_tags, _ = zip(*rest, strict=True)
            assert [*map(list, found_tags)] == [index, repeat]
            assert [restored.store[0][slot] for slot in slots] == index
        else:
            assert not rest
        for index, _ in drawn[:at]:
            for i in np.ravel(index).tolist():
                if i in restored.uses:
                    restored.uses[i] += 1
        for number, expected in enumerate(drawn[at : at + 12], at):
            # The end is told again, by the upstream that is read again.
            if number >= len(readiness) and not restored.ended:
                restored.end(total - restored.rows)
            assert restored.step(ready=False) == expected


def test_a_small_case_by_hand():
    """Two lanes of one item: fresh, echo of the older, wait at the cap."""
    args = {"buffer": 4, "batch_size": 2, "host_batch": 2, "num_lanes": 2, "cap": 2}
    driver = Driver(make(args), args)
    assert driver.plan.need(1) == Need(must=1)
    assert driver.step(True) == [[[0], [1]], [[0], [0]]]
    assert driver.plan.need(1) == Need(may=1)
    assert driver.step(True) == [[[2], [3]], [[0], [0]]]
    assert driver.step(False) == [[[0], [1]], [[1], [1]]]
    assert driver.step(False) == [[[2], [3]], [[1], [1]]]
    assert driver.plan.need(1) == Need(must=1)
    assert driver.plan.write(1).tolist() == [[0], [0]]
    assert list(driver.plan.log) == [True, True, False, False]


def test_a_stall_uses_all_items_up_to_the_cap_and_far_apart():
    """64 items in 16 batches, then no more data until every item is at the cap."""
    args = {"buffer": 64, "batch_size": 4, "host_batch": 4, "cap": 4}
    driver = Driver(make(args), args)
    drawn = [driver.step(True) for _ in range(16)]
    while driver.plan.need(4).may:
        drawn.append(driver.step(False))
    assert driver.plan.need(4) == Need(must=4)
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
    batch, kept = 8, 64
    args = {"buffer": kept * batch, "batch_size": batch, "host_batch": batch}
    driver = Driver(make(args), args)
    last, lags = {}, []
    arrived, taken = 0.0, 0
    for number in range(int(12 * kept * ratio)):
        arrived += 1 / ratio
        for item in np.ravel(driver.step(arrived - taken >= 1)[0]).tolist():
            lags.append(number - last.get(item, number))
            last[item] = number
        taken = driver.host_batches
    assert driver.host_batches >= 12 * kept - 1, "data that was ready was not taken"
    settled = np.array(lags[len(lags) // 2 :])
    settled = settled[settled > 0]
    assert np.quantile(settled, 0.1) > kept / 2
    # No item is used often while another is hardly used.
    uses = [n for item, n in driver.uses.items() if item < 10 * kept * batch]
    assert np.std(uses) < 0.75


def test_lanes_choose_for_themselves():
    args = {"buffer": 128, "batch_size": 8, "host_batch": 8, "num_lanes": 2}
    driver = Driver(make(args), args)
    drawn = [driver.step(i < 16) for i in range(32)]
    lanes = np.array([index for index, _ in drawn])[16:]
    assert not np.array_equal(lanes[:, 0] % 4, lanes[:, 1] % 4)
    other = Driver(make(args | {"seed": 1}), args)
    assert drawn[16:] != [other.step(i < 16) for i in range(32)][16:]


def test_nothing_is_echoed_while_data_comes_in_time():
    args = {"buffer": 40, "batch_size": 4, "host_batch": 6}
    driver = Driver(make(args), args)
    drawn = [driver.step(True)[0][0] for _ in range(30)]
    assert np.ravel(drawn).tolist() == list(range(120))


def test_all_items_are_used_up_at_the_end_and_the_last_batch_may_be_smaller():
    """Cap 2: 4 and 3 items are 14 uses, of which the last 2 are half a batch."""
    args = {"buffer": 8, "batch_size": 4, "host_batch": 4, "cap": 2}
    driver = Driver(make(args), args)
    assert driver.step(True) == [[[0, 1, 2, 3]], [[0, 0, 0, 0]]]
    driver.end(3)
    assert driver.plan.need(4) == Need(may=3)
    assert driver.plan.write(3).tolist() == [[4, 5, 6]]
    driver.rows += 3
    driver.store[0] |= {4: 4, 5: 5, 6: 6}
    driver.uses |= {4: 0, 5: 0, 6: 0}
    index, repeat = driver.draw()
    assert (index[0][:3], repeat) == ([4, 5, 6], [[0, 0, 0, 1]])
    sizes = [len(driver.draw()[0][0]) for _ in range(2)]
    assert sizes == [4, 2]
    assert set(driver.uses.values()) == {2}
    assert driver.plan.next(4) is None
    assert driver.plan.counts() == Counts(fresh=7, uses=14, repeats=7)
    assert list(driver.plan.log) == [True, True, False, False]


def test_a_first_host_batch_may_be_smaller_if_it_is_the_last():
    args = {"buffer": 8, "batch_size": 4, "host_batch": 4, "cap": 2}
    driver = Driver(make(args), args)
    assert driver.plan.need(4) == Need(must=4)
    driver.end(3)
    assert driver.step(True) == [[[0, 1, 2]], [[0, 0, 0]]]
    restored, _ = driver.restored(driver.plan.get_state(), None, args)
    assert restored.plan.counts() == Counts(fresh=3, uses=3, repeats=0)
    assert restored.store == [{0: 0, 1: 1, 2: 2}]
    for plan in (driver.plan, restored.plan):
        plan.end(0)
        assert sorted(plan.next(4).fresh_index[0].tolist()) == [0, 1, 2]
        assert plan.next(4) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_lanes": 3}, "not a multiple of num_lanes=3"),
        ({"cap": 0}, "got 0. Use cap=1."),
        ({"host_batch": 6}, "batch_size=8 needs .* these have 6 .* use larger ones"),
        ({"buffer": 7}, "buffer=7 is too small .* use at least 8"),
        ({"buffer": 16, "host_batch": 12}, "use at least 16"),
    ],
)
def test_what_cannot_work_is_refused(changes, message):
    args = {"buffer": 64, "batch_size": 8, "host_batch": 8, "num_lanes": 2}
    if message == "use at least 16":
        make(args | changes)
        changes = changes | {"buffer": 15}
    with pytest.raises(ValueError, match=message):
        make(args | changes)


SMALL = {"buffer": 8, "batch_size": 2, "host_batch": 2, "cap": 2}


def test_a_driver_that_does_not_ask_is_told():
    plan = make(SMALL)
    with pytest.raises(RuntimeError, match=re.escape("ask need() before next()")):
        plan.next(2)
    plan.write(2)
    with pytest.raises(RuntimeError, match=re.escape("ask need() before write()")):
        plan.write(2)


def test_a_log_of_another_run_is_refused():
    plan = make(SMALL, DecisionLog([False]))
    assert plan.need(2).must == 2  # An upstream that had ended would give nothing.
    with pytest.raises(ValueError, match="takes nothing before batch 0"):
        plan.write(2)
    short = make(SMALL, DecisionLog([True, True]))
    short.write(2)
    short.next(2)
    with pytest.raises(RuntimeError, match="the log takes items here"):
        short.next(2)
    short.end(0)
    with pytest.raises(ValueError, match="takes fresh items before batch 1"):
        short.next(2)


def drawn_once():
    """A plan after its first batch."""
    plan = make(SMALL)
    plan.write(2)
    plan.next(2)
    return plan


def test_a_state_is_json_of_an_output_alone():
    plan = drawn_once()
    state = plan.get_state()
    assert json.loads(json.dumps(state)) == state
    assert set(state) == {"fresh", "log", "pending", "plan"}
    make(SMALL).check_state(plan.get_state(pending=1))
    plan.write(2)
    with pytest.raises(ValueError, match="log takes 2 items; it is damaged"):
        plan.check_state(plan.get_state())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"more": 0}, "give what get_state returned"),
        ({"fresh": 2.0}, "fresh=2.0, which must be an integer"),
        ({"fresh": True}, "fresh=True, which must be an integer"),
        ({"fresh": 3}, "fresh=3 and pending=0, but its log takes 2 items"),
        ({"fresh": 0}, "fresh=0 and pending=0, but its log takes 2 items"),
        ({"fresh": 1 << 60}, "it is damaged"),
        ({"pending": 2}, "pending=2"),
        ({"pending": -1}, "pending=-1"),
        ({"pending": None}, "pending=None, which must be an integer"),
        ({"plan": 0}, "saved with another spec"),
        ({"plan": "0"}, "plan='0', which must be an integer"),
        ({"log": None}, "not the record of a decision log"),
        ({"log": DecisionLog([True, False]).to_json() | {"bits": "?"}}, "decoded"),
        ({"log": DecisionLog([False]).to_json(), "fresh": 0}, "takes too few items"),
        ({"log": DecisionLog([]).to_json(), "fresh": 0, "pending": 1}, "pending=1"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage, message):
    plan = drawn_once()
    state = plan.get_state()
    plan.check_state(state)
    with pytest.raises(ValueError, match=message):
        plan.check_state(state | damage)
    assert plan.get_state() == state
    assert plan.next(2).repeat.tolist() == [[1, 1]]


def test_a_state_without_one_of_its_keys_is_refused():
    plan = drawn_once()
    state = plan.get_state()
    for key in state:
        with pytest.raises(ValueError, match="give what get_state returned"):
            plan.check_state({k: v for k, v in state.items() if k != key})
    with pytest.raises(ValueError, match="None is not the state of an adaptive echo"):
        plan.check_state(None)


@pytest.mark.parametrize(
    ("rows", "damage", "message"),
    [
        (1, {"pending": 1}, "pending=1, but its last batch has 1 uses"),
        (2, {"log": DecisionLog([True, False, False]).to_json()}, "takes too few"),
    ],
)
def test_a_state_that_only_its_batches_show_as_damaged_changes_nothing(
    rows, damage, message
):
    plan = make(SMALL)
    plan.end(rows)
    plan.write(rows)
    plan.next(2)
    damaged = plan.get_state() | damage
    other = drawn_once()
    state = other.get_state()
    with pytest.raises(ValueError, match=message):
        other.set_state(damaged)
    assert other.get_state() == state
    assert other.next(2).repeat.tolist() == [[1, 1]]


@pytest.mark.parametrize(
    "other",
    [
        make(SMALL | {"buffer": 9}),
        make(SMALL | {"batch_size": 1}),
        make(SMALL | {"host_batch": 3}),
        make(SMALL | {"num_lanes": 2}),
        make(SMALL | {"cap": 3}),
        make(SMALL | {"seed": 1}),
        make(SMALL, options=("batch",)),
    ],
)
def test_a_state_of_another_echo_is_refused(other):
    with pytest.raises(ValueError, match="restore it with what it was saved with"):
        other.check_state(drawn_once().get_state())


def test_a_state_beside_the_log_that_is_replayed_is_refused():
    plan = make(SMALL, DecisionLog([True, False, True]))
    with pytest.raises(ValueError, match="not on the way of the log"):
        make(SMALL, DecisionLog([False])).check_state(drawn_once().get_state())
    plan.check_state(drawn_once().get_state())


def test_an_ended_stream_is_restored_as_ended():
    """The upstream, which is read again, says again that it has ended."""
    plan = drawn_once()
    plan.end(0)
    restored = make(SMALL)
    restored.set_state(plan.get_state())
    restored.end(0)
    assert restored.need(2) == Need()
    assert restored.next(2).repeat.tolist() == [[1, 1]]
    assert restored.next(2) is None
