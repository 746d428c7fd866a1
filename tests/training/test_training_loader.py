"""How fast fresh batches come, and the threads that are chosen by it."""

import itertools
import json
import time
from dataclasses import replace

import numpy as np
import pytest
from tiny_workload import make_workload, run, tiny_config

from echo_jax.config import load_config
from echo_jax.echo.instrument.fresh_time import FreshTime
from echo_jax.training import train
from echo_jax.training.feeds import loader
from echo_jax.training.feeds.loader import choose_threads, measure_loader
from echo_jax.workloads import build


@pytest.mark.parametrize(
    ("times", "threads"),
    [
        ({1: 1.0, 2: 0.95}, 1),  # A tenth is not gained.
        ({1: 1.0, 2: 0.5, 4: 0.25, 8: 0.24}, 4),
        ({1: 1.0, 2: 0.9, 4: 0.82}, 2),  # Just a tenth is.
        ({1: 1.0, 2: 1.5}, 1),
        ({2**k: 0.5**k for k in range(7)}, 64),  # There is a bound.
    ],
)
def test_threads_are_doubled_as_long_as_that_gains_a_tenth(times, threads):
    assert choose_threads(times.pop) == threads
    assert not times, "what is not needed is not measured"


def several(config):
    """A tiny workload that can be read by more threads; it says by how many."""
    workload = make_workload(config)

    def with_threads(threads):
        # Only that each is another one counts.
        return replace(workload, metadata={"threads": threads}, with_threads=None)

    return replace(workload, with_threads=with_threads)


@pytest.fixture
def time_of(monkeypatch):
    """Sets how long batches take by so many threads; gives what was asked."""
    real, asked = loader._time_loader, []

    def set_to(times):
        def time_loader(workload, *args):
            asked.append(workload.metadata["threads"])
            return times[asked[-1]], real(workload, *args)[1]

        monkeypatch.setattr(loader, "_time_loader", time_loader)
        return asked

    return set_to


def test_threads_that_are_left_open_are_chosen_and_recorded(tmp_path, time_of):
    given = run(tmp_path / "given")
    config = tiny_config(data__threads="auto")
    asked = time_of({1: 0.4, 2: 0.2, 4: 0.19})
    chosen = train(config, several(config), tmp_path / "chosen")
    assert asked == [1, 2, 4]
    environment = json.loads((tmp_path / "chosen" / "environment.json").read_text())
    assert environment["chosen"]["threads"] == 2
    config_json = json.loads((tmp_path / "chosen" / "config.json").read_text())
    assert config_json["data"]["threads"] == "auto"
    # They change when a batch is ready, and never what is in it.
    assert chosen["params_sha256"] == given["params_sha256"]


def test_the_loader_that_was_measured_reads_by_the_threads_that_were_chosen(time_of):
    config = tiny_config(data__threads="auto")
    time_of({1: 0.4, 2: 0.2, 4: 0.1, 8: 0.1})
    lines = []
    found = measure_loader(several(config), config, note=lines.append)
    assert found.threads == 4 == found.workload.metadata["threads"]
    assert found.t_up_s == 0.1
    assert lines == [
        "data.threads=4: a fresh batch takes 400 ms by 1, 200 ms by 2, 100 ms by 4, "
        "100 ms by 8"
    ]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_workload_of_ours_is_read_by_as_many_threads_as_are_asked_for(threads):
    workload = build(load_config("configs/lm.py:tiny")).with_threads(threads)
    for dataset in (workload.train_dataset, workload.fresh_dataset):
        assert dataset.args[1].threads == threads


class MadeAhead:
    """Batches of which the first come at once, and each later one takes 5 ms."""

    fresh_time = FreshTime(elements_per_batch=2.0, held=8)

    def __iter__(self):
        for number in itertools.count():
            if number > 4:
                time.sleep(0.005)
            yield {"x": np.zeros((2, 4), np.float32)}


def test_what_threads_had_made_ahead_is_not_timed():
    config = tiny_config(batch_size=2)
    made_ahead = replace(make_workload(config), train_dataset=lambda *args: MadeAhead())
    assert measure_loader(made_ahead, config, most=6).t_up_s >= 0.005


class InBursts:
    """Batches that come by fours, of which the last takes 20 ms."""

    fresh_time = FreshTime(elements_per_batch=1.0, held=4)

    def __iter__(self):
        for number in itertools.count():
            time.sleep(0.02 if number and number % 4 == 0 else 0)
            yield {"x": np.zeros((2, 4), np.float32)}


def test_batches_that_come_together_are_timed_together():
    config = tiny_config(batch_size=2)
    bursts = replace(make_workload(config), train_dataset=lambda *args: InBursts())
    assert measure_loader(bursts, config, most=6).t_up_s >= 0.005


def test_threads_are_not_left_open_to_a_workload_that_knows_none():
    config = tiny_config(data__threads="auto")
    workload = make_workload(config)
    with pytest.raises(ValueError, match=r"'auto' needs a workload with with_threads"):
        measure_loader(workload, config)
    several = replace(workload, with_threads=lambda threads: workload)
    assert measure_loader(several, config, most=1).threads >= 1


def test_a_run_with_threads_left_open_is_resumed(tmp_path):
    config = tiny_config(data__threads="auto", updates=8)
    workload = make_workload(config)
    workload = replace(workload, with_threads=lambda threads: workload)
    train(config, workload, tmp_path / "a")
    config = tiny_config(data__threads="auto", updates=12)
    resumed = train(config, workload, tmp_path / "a")
    assert resumed["params_sha256"] == run(tmp_path / "b", updates=12)["params_sha256"]
