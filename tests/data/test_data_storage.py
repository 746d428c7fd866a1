import math
import pickle
import threading

import numpy as np
import pytest

from echo_jax.data.pipeline.storage import SimulatedStorage, StorageSpec


class FakeTime:
    """A clock that only sleeping moves, by `late_s` more than was asked for."""

    def __init__(self, late_s: float = 0.0):
        self.now_s = 100.0
        self.late_s = late_s
        self.slept_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds + self.late_s

    def storage(self, **spec) -> SimulatedStorage:
        return SimulatedStorage(
            StorageSpec(**spec), seed=0, clock=lambda: self.now_s, sleep=self.sleep
        )


def test_latencies_have_the_stated_distribution():
    num_reads = 20_000
    for distribution in ("constant", "exponential", "bursty"):
        storage = SimulatedStorage(StorageSpec(0.5, 0.0, distribution), seed=3)
        latencies = np.array([storage.latency_s(i) for i in range(num_reads)])
        assert latencies.mean() == pytest.approx(0.5, rel=0.05)
        if distribution == "constant":
            assert set(latencies) == {0.5}
        elif distribution == "bursty":
            assert set(latencies) == {0.5 * 0.4, 0.5 * 6.4}
            assert np.mean(latencies > 0.5) == pytest.approx(0.1, abs=0.01)
        else:
            # The median of an exponential is log(2) of its mean.
            assert np.median(latencies) == pytest.approx(0.5 * math.log(2), rel=0.05)
            assert latencies.min() >= 0


def test_latency_is_a_function_of_seed_and_index():
    spec = StorageSpec(1.0, 0.0, "exponential")
    storage = SimulatedStorage(spec, seed=7)
    forwards = [storage.latency_s(i) for i in range(50)]
    backwards = [storage.latency_s(i) for i in reversed(range(50))]
    copied = pickle.loads(pickle.dumps(storage))
    assert forwards == backwards[::-1] == [copied.latency_s(i) for i in range(50)]
    other = SimulatedStorage(spec, seed=8)
    assert forwards != [other.latency_s(i) for i in range(50)]


def test_without_delay_nothing_sleeps():
    time = FakeTime()
    time.storage().wait(0, 10**9)
    assert time.slept_s == []


def test_read_takes_latency_and_then_transfer():
    time = FakeTime()
    time.storage(latency_s=2.0, bytes_per_s=100.0).wait(0, 50)
    assert time.slept_s == [2.0, 0.5]


def test_late_wake_up_is_given_back_to_the_next_read():
    time = FakeTime(late_s=0.001)
    storage = time.storage(latency_s=0.01)
    for read in range(100):
        storage.wait(read, 1)
    assert time.now_s - 100.0 == pytest.approx(100 * 0.01 + 0.001)


def test_long_suspension_does_not_make_reads_free():
    time = FakeTime()
    storage = time.storage(latency_s=1.0)
    time.late_s = 60.0
    storage.wait(0, 1)
    time.late_s = 0.0
    for read in range(1, 4):
        storage.wait(read, 1)
    assert time.slept_s == pytest.approx([1.0, 0.99, 1.0, 1.0])


def test_latencies_of_concurrent_reads_overlap():
    everybody_sleeps = threading.Barrier(3)
    # With a lock held while sleeping, the barrier would time out and raise.
    storage = SimulatedStorage(
        StorageSpec(latency_s=1.0, bytes_per_s=1.0),
        seed=0,
        sleep=lambda _: everybody_sleeps.wait(timeout=120),
    )
    errors = []

    def read(index: int) -> None:
        try:
            storage.wait(index, 1)
        except threading.BrokenBarrierError as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_concurrent_reads_share_the_bandwidth():
    # The clock stands still: all three ask at the same moment.
    slept_s = []
    storage = SimulatedStorage(
        StorageSpec(bytes_per_s=100.0), 0, clock=lambda: 5.0, sleep=slept_s.append
    )
    for read in range(3):
        storage.wait(read, 50)
    assert slept_s == [0.5, 1.0, 1.5]


def test_idle_link_saves_up_no_bandwidth():
    time = FakeTime()
    storage = time.storage(bytes_per_s=100.0)
    storage.wait(0, 100)
    time.now_s += 60
    storage.wait(1, 100)
    assert time.slept_s == [1.0, 1.0]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"latency_s": -1.0}, "latency_s"),
        ({"latency_s": math.nan}, "latency_s"),
        ({"bytes_per_s": math.inf}, "bytes_per_s"),
        ({"distribution": "normal"}, "'normal'.*constant, exponential, bursty"),
    ],
)
def test_bad_spec_is_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        StorageSpec(**fields)


def test_facts_say_simulated():
    assert StorageSpec(latency_s=0.1).metadata()["simulated"] is True
    assert StorageSpec(bytes_per_s=10.0).metadata()["simulated"] is True
    assert StorageSpec().metadata()["simulated"] is False
