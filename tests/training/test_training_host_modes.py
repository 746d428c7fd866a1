"""Adaptive and stochastic echo on the host, in the trainer."""

import signal

import pytest
from test_training_device import ADAPTIVE, STOCHASTIC, exact, rows_of
from tiny_workload import run

from echo_jax.echo.decision_log import DecisionLog
from echo_jax.training import Interrupted
from echo_jax.training.feeds.feed import HostFeed

PLACES = {
    "decode": {"echo__where": "host"},
    "batch": {"echo__where": "host", "echo__after": "batch"},
}


@pytest.fixture
def stop_at_take(monkeypatch):
    """Has a signal come before the host feed makes an input, by its number."""
    takes, at = [0], [0]
    original = HostFeed.take

    def take(self, num_updates):
        takes[0] += 1
        if takes[0] == at[0]:
            signal.raise_signal(signal.SIGTERM)
        return original(self, num_updates)

    monkeypatch.setattr(HostFeed, "take", take)

    def arrange(number):
        takes[0], at[0] = 0, number

    return arrange


@pytest.mark.parametrize("after", PLACES)
def test_an_adaptive_run_on_the_host_repeats_with_its_log(
    tmp_path, stop_at_take, after
):
    options = {**ADAPTIVE, **PLACES[after]}
    first = tmp_path / "first"
    for take in (3, 5):
        stop_at_take(take)
        with pytest.raises(Interrupted):
            run(first, **options)
    stop_at_take(0)
    summary = run(first, **options)
    log = DecisionLog.load(first / "tape.json")
    assert len(log) == 12
    assert summary["fresh"] == 8 * sum(log)
    assert summary["fresh"] + summary["repeats"] == 8 * 12

    again = tmp_path / "again"
    stop_at_take(7)
    options["echo__replay"] = str(first / "tape.json")
    with pytest.raises(Interrupted):
        run(again, **options)
    replayed = run(again, **options)
    assert replayed["params_sha256"] == summary["params_sha256"]
    assert list(map(exact, rows_of(again))) == list(map(exact, rows_of(first)))
    assert DecisionLog.load(again / "tape.json") == log


@pytest.mark.parametrize("place", [*PLACES.values(), {}], ids=[*PLACES, "device"])
def test_an_adaptive_run_takes_fresh_data_by_a_pattern(tmp_path, place):
    options = {**ADAPTIVE, **place, "echo__replay": "pattern:10110000"}
    summary = run(tmp_path, **options)
    log = DecisionLog.load(tmp_path / "tape.json")
    assert [*log] == [bool(int(each)) for each in "101100001011"]
    assert (summary["fresh"], summary["repeats"]) == (8 * 6, 8 * 6)


def test_a_stochastic_run_on_the_host_is_that_on_the_devices(tmp_path, stop_at_take):
    device = run(tmp_path / "device", **STOCHASTIC)
    options = {**STOCHASTIC, "echo__where": "host"}
    stop_at_take(5)
    with pytest.raises(Interrupted):
        run(tmp_path / "host", **options)
    host = run(tmp_path / "host", **options)
    assert (host["fresh"], host["repeats"]) == (device["fresh"], device["repeats"])
    rows = [list(map(exact, rows_of(tmp_path / name))) for name in ("host", "device")]
    for row, other in zip(*rows, strict=True):
        assert row.pop("kind") == other.pop("kind")
        assert row == pytest.approx(other, rel=1e-6)
