"""The rows and the summary of a run, and the file of the rows."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_workload import Regression, rows_of, run, stop_at, tiny_config

from echo_jax.files import read_line, run_folder
from echo_jax.training import MAX_METRICS, Interrupted
from echo_jax.training.records import (
    MetricsFile,
    config_sha256,
    first_to_meet,
    idle_fraction,
    train_metrics,
)


@dataclass(frozen=True)
class Named(Regression):
    """Returns metrics of these names: 1 of every 2, then 2 of every 2, and so on.

    The metric "nothing" has seen no example.
    """

    names: tuple[str, ...] = ()

    def loss(self, variables, batch, key):
        losses, others, _ = super().loss(variables, batch, key)
        sums = {name: (i + 1.0, 2) for i, name in enumerate(self.names)}
        if "nothing" in sums:
            sums["nothing"] = (0.0, jnp.zeros(()))
        return losses, others, sums


def train_rows(workdir):
    return [row for row in rows_of(workdir) if row["kind"] == "train"]


def test_a_metric_is_logged_by_being_returned(tmp_path):
    names = (*(f"m{i}" for i in reversed(range(MAX_METRICS - 1))), "nothing")
    summary = run(tmp_path, task=Named(names=names), updates=4)
    expected = {name: (i + 1) / 2 for i, name in enumerate(names)}
    # A metric of no examples is null.
    expected["nothing"] = None
    (row,) = train_rows(tmp_path)
    assert train_metrics(row) == expected
    assert summary["train_final"] == {"loss": row["loss"], **expected}


def test_the_logged_metric_is_that_of_the_window_also_after_a_stop(tmp_path):
    run(tmp_path / "every", log_every=1, echo__factor=2.0)
    run(tmp_path / "fourth", echo__factor=2.0)
    every = [row["train_kept"] for row in train_rows(tmp_path / "every")]
    fourth = [row["train_kept"] for row in train_rows(tmp_path / "fourth")]
    means = np.reshape(every, (3, 4)).mean(axis=1)
    np.testing.assert_allclose(fourth, means, rtol=1e-6)
    assert len({*every}) > 4
    with pytest.raises(Interrupted):
        run(tmp_path / "stopped", echo__factor=2.0, on_batch=stop_at(6))
    run(tmp_path / "stopped", echo__factor=2.0)
    assert [row["train_kept"] for row in train_rows(tmp_path / "stopped")] == fourth


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([f"m{i}" for i in range(MAX_METRICS + 1)], "returned 17 metrics, and"),
        (["s"], "train_s are the seconds"),
    ],
)
def test_metrics_that_cannot_be_logged_are_refused(tmp_path, names, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, task=Named(names=tuple(names)))


def test_idle_is_what_is_left_of_the_time():
    assert idle_fraction(1.0, 4.0) == 0.75
    assert idle_fraction(4.0 + 1e-12, 4.0) == 0.0


@pytest.mark.parametrize(
    ("mode", "target", "update"),
    [
        ("min", 3.0, 2),
        ("min", 2.5, 4),
        ("min", 1.0, None),
        ("max", 3.5, 4),
        ("min", 0.0, None),
    ],
)
def test_first_evaluation_that_meets_a_target(mode, target, update):
    values = [None, 3.0, None, 2.0] if mode == "min" else [None, 3.0, None, 4.0]
    rows = [{"kind": "train", "updates": 0, "loss": 0.1}] + [
        {"kind": "eval", "updates": i + 1, "eval_loss": value}
        for i, value in enumerate(values)
    ]
    row = first_to_meet(rows, metric="loss", mode=mode, target=target)
    assert (row and row["updates"]) == update


def test_the_hash_of_a_config_ignores_what_may_change():
    same = config_sha256(tiny_config(updates=99, target=0.5, eval_every=7))
    assert same == config_sha256(tiny_config())
    assert same != config_sha256(tiny_config(seed=1))


@pytest.fixture
def opened(tmp_path):
    """Opens the file, after it has been written with some rows."""

    def open_file(updates=(), **options):
        file = run_folder(tmp_path) / "metrics.jsonl"
        if updates:
            written = MetricsFile(file, resumed_from=None)
            for update in updates:
                written.append({"kind": "train", "updates": update})
        return MetricsFile(file, **options) if options else None

    return open_file


def lines_of(tmp_path):
    return (tmp_path / "metrics.jsonl").read_bytes().splitlines()


def test_rows_are_in_the_file_at_once(opened, tmp_path):
    metrics = opened(resumed_from=None)
    metrics.append({"kind": "train", "updates": 1, "loss": float("nan")})
    metrics.append({"kind": "eval", "updates": 2})
    assert [*map(read_line, lines_of(tmp_path))] == metrics.rows
    assert metrics.rows[0]["loss"] is None


def test_a_resumed_file_forgets_later_rows_and_a_torn_line(opened, tmp_path):
    path = tmp_path / "metrics.jsonl"
    opened((2, 4, 6))
    path.write_text(path.read_text() + '{"kind": "tr')
    resumed = opened(resumed_from=4)
    assert [row["updates"] for row in resumed.rows] == [2, 4]
    resumed.append({"kind": "train", "updates": 6})
    assert [read_line(line)["updates"] for line in lines_of(tmp_path)] == [2, 4, 6]
    assert opened(resumed_from=None).rows == []
    assert path.read_text() == ""


@pytest.mark.parametrize(
    "damage",
    [
        b"{",
        b"[]",
        b"1",
        b"null",
        b'{"kind": "train"}',
        b'{"updates": 3}',
        b'{"kind": "train", "updates": "3"}',
        b"\xff",
        b'{"kind": "train", "updates": 3, "crc32": "00000000"}',
    ],
)
def test_a_damaged_line_costs_no_other_row(opened, tmp_path, damage):
    opened(range(1, 6))
    first, second, _, *others = lines_of(tmp_path)
    lines = [first, second, damage, *others, b'{"upd']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    resumed = opened(resumed_from=4, num_rows=4)
    assert [row["updates"] for row in resumed.rows] == [1, 2, 4]
    assert (resumed.damaged, resumed.num_missing) == ([3], 1)


@pytest.mark.parametrize("kept", range(1, 6))
def test_rows_that_were_cut_off_at_the_end_of_a_line_are_counted(opened, kept):
    """Of those that the checkpoint saw: newer ones are made again."""
    opened(range(1, kept + 1))
    resumed = opened(resumed_from=4, num_rows=4)
    assert resumed.num_missing == max(0, 4 - kept)
    assert resumed.damaged == []
