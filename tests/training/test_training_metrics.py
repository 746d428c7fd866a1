"""What a task returns beside its losses, in the rows and the summary of a run."""

import json
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_workload import Regression, run, stop_at

from echo_jax.training import Interrupted
from echo_jax.training.records.metrics import idle_fraction, train_metrics
from echo_jax.training.window import MAX_METRICS


@dataclass(frozen=True)
class Named(Regression):
    """Returns metrics of these names: 1 of every 2, then 2 of every 2, and so on."""

    names: tuple[str, ...] = ()

    def loss(self, variables, batch, key):
        losses, others, _ = super().loss(variables, batch, key)
        sums = {name: (i + 1.0, 2) for i, name in enumerate(self.names)}
        return losses, others, sums


def train_rows(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "train"]


def test_a_metric_is_logged_by_being_returned(tmp_path):
    names = tuple(f"m{i}" for i in reversed(range(MAX_METRICS)))
    summary = run(tmp_path, task=Named(names=names), updates=4)
    expected = {name: (i + 1) / 2 for i, name in enumerate(names)}
    assert train_metrics(train_rows(tmp_path)[0]) == expected
    assert summary["train_final"] == {
        "loss": train_rows(tmp_path)[0]["loss"],
        **expected,
    }


def test_the_logged_metric_is_that_of_the_window(tmp_path):
    run(tmp_path / "every", log_every=1)
    run(tmp_path / "fourth", log_every=4)
    every = [row["train_kept"] for row in train_rows(tmp_path / "every")]
    fourth = [row["train_kept"] for row in train_rows(tmp_path / "fourth")]
    means = np.reshape(every, (3, 4)).mean(axis=1)
    np.testing.assert_allclose(fourth, means, rtol=1e-6)
    assert len({*every}) > 4


def test_a_window_goes_on_after_a_stop(tmp_path):
    run(tmp_path / "whole", echo__factor=2.0)
    with pytest.raises(Interrupted):
        run(tmp_path / "stopped", echo__factor=2.0, on_batch=stop_at(6))
    run(tmp_path / "stopped", echo__factor=2.0)
    for whole, stopped in zip(
        train_rows(tmp_path / "whole"), train_rows(tmp_path / "stopped"), strict=True
    ):
        assert whole["train_kept"] == stopped["train_kept"]


class Nothing(Regression):
    """Its metric has seen no example."""

    def loss(self, variables, batch, key):
        losses, others, _ = super().loss(variables, batch, key)
        return losses, others, {"nothing": (0.0, jnp.zeros(()))}


def test_a_metric_of_no_examples_is_null(tmp_path):
    run(tmp_path, task=Nothing(), updates=4)
    assert train_rows(tmp_path)[0]["train_nothing"] is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (tuple(f"m{i}" for i in range(MAX_METRICS + 1)), "returned 17 metrics, and"),
        (("s",), "train_s are the seconds"),
    ],
)
def test_metrics_that_cannot_be_logged_are_refused(tmp_path, names, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, task=Named(names=names))


def test_idle_is_what_is_left_of_the_time():
    assert idle_fraction(1.0, 4.0) == 0.75
    assert idle_fraction(4.0 + 1e-12, 4.0) == 0.0
