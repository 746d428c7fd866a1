import json

import pytest
from tiny_workload import tiny_config

from echo_jax.files.folders import run_folder
from echo_jax.files.json_files import read_json, read_line
from echo_jax.files.lock import LOCK_NAME
from echo_jax.training.records import environment
from echo_jax.training.records.environment import (
    check_workdir,
    claim_workdir,
    config_sha256,
    lock_workdir,
)
from echo_jax.training.records.metrics import first_to_meet
from echo_jax.training.records.runfiles import MetricsFile


def test_rows_are_in_the_file_at_once(tmp_path):
    metrics = MetricsFile(run_folder(tmp_path) / "metrics.jsonl", resumed_from=None)
    metrics.append({"kind": "train", "updates": 1, "loss": float("nan")})
    metrics.append({"kind": "eval", "updates": 2})
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert [read_line(line) for line in lines] == metrics.rows
    assert metrics.rows[0]["loss"] is None


def test_a_resumed_file_forgets_later_rows_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = run_folder(tmp_path) / "metrics.jsonl"
    metrics = MetricsFile(file, resumed_from=None)
    for update in (2, 4, 6):
        metrics.append({"kind": "train", "updates": update})
    path.write_text(path.read_text() + '{"kind": "tr')
    resumed = MetricsFile(file, resumed_from=4)
    assert [row["updates"] for row in resumed.rows] == [2, 4]
    resumed.append({"kind": "train", "updates": 6})
    lines = path.read_bytes().splitlines()
    assert [read_line(line)["updates"] for line in lines] == [2, 4, 6]
    assert MetricsFile(file, resumed_from=None).rows == []
    assert path.read_text() == ""


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        "1",
        "null",
        '{"kind": "train"}',
        "\xff",
        '{"kind": "train", "updates": 3, "crc32": "00000000"}',
    ],
)
def test_a_damaged_line_costs_no_other_row(tmp_path, damage):
    file = run_folder(tmp_path) / "metrics.jsonl"
    metrics = MetricsFile(file, resumed_from=None)
    for update in range(1, 6):
        metrics.append({"kind": "train", "updates": update})
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    lines[2] = damage.encode("latin1")
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines, b'{"upd']))
    resumed = MetricsFile(file, resumed_from=4)
    assert [row["updates"] for row in resumed.rows] == [1, 2, 4]
    assert resumed.damaged == [3]
    assert resumed.num_lost == 1


def test_rows_that_were_cut_off_at_the_end_of_a_line_are_counted(tmp_path):
    """Of those that the checkpoint saw: newer ones are made again."""
    file = run_folder(tmp_path) / "metrics.jsonl"
    rows = [{"kind": "train", "updates": update} for update in range(1, 6)]
    for kept in range(6):
        metrics = MetricsFile(file, resumed_from=None)
        for row in rows[:kept]:
            metrics.append(row)
        resumed = MetricsFile(file, resumed_from=4, num_rows=4)
        assert resumed.num_missing == resumed.num_lost == max(0, 4 - kept)
        assert resumed.damaged == []


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


def test_a_folder_belongs_to_one_config(tmp_path):
    workdir = run_folder(tmp_path / "a" / "b")
    for config in (tiny_config(), tiny_config(updates=99, target=0.5, log_every=7)):
        check_workdir(workdir, config)
        claim_workdir(workdir, config)
    assert read_json(workdir / "config.json")["updates"] == 99
    with pytest.raises(
        ValueError, match=r"another config; it differs in batch_size \(8 -> 16\), echo"
    ):
        check_workdir(workdir, tiny_config(batch_size=16, echo__factor=2.0))
    (tmp_path / "a" / "b" / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is damaged: .*another"):
        check_workdir(workdir, tiny_config())


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_process_locks_for_all_and_the_others_wait(
    tmp_path, monkeypatch, is_first
):
    waited = []
    monkeypatch.setattr(environment, "is_main_process", lambda: is_first)
    monkeypatch.setattr(environment, "wait_for_all", waited.append)
    with lock_workdir(run_folder(tmp_path)) as lock:
        lock.check()
        assert (tmp_path / LOCK_NAME).exists() == is_first
    assert len(waited) == 1


def test_the_hash_of_a_config_ignores_what_may_change():
    same = config_sha256(tiny_config(updates=99, target=0.5, eval_every=7))
    assert same == config_sha256(tiny_config())
    assert same != config_sha256(tiny_config(seed=1))


def test_a_row_without_its_kind_is_damage(tmp_path):
    good = {"kind": "eval", "updates": 1}
    rows = [good, {"updates": 1}, {"kind": "eval", "updates": "1"}, [], good]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = MetricsFile(run_folder(tmp_path) / "metrics.jsonl", resumed_from=1)
    assert (metrics.rows, metrics.damaged) == ([good, good], [2, 3, 4])
