"""The rows of a run, their file, and the loggers that show them."""

import shutil
import struct
import sys
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tiny_workload import Regression, make_workload, rows_of, run, tiny_config

from echo_jax.files import read_line, run_folder
from echo_jax.training import MAX_METRICS, train
from echo_jax.training.records import (
    MetricsFile,
    first_to_meet,
    scalars_of,
    train_metrics,
)


@dataclass(frozen=True)
class Named(Regression):
    """Returns metrics of these names: 1/2, 2/2, and so on; "nothing" has no example."""

    names: tuple[str, ...] = ()

    def loss(self, variables, batch, key):
        losses, others, _ = super().loss(variables, batch, key)
        sums = {name: (i + 1.0, 2) for i, name in enumerate(self.names)}
        if "nothing" in sums:
            sums["nothing"] = (0.0, jnp.zeros(()))
        return losses, others, sums


def test_a_metric_is_logged_by_being_returned(tmp_path):
    names = (*(f"m{i}" for i in reversed(range(MAX_METRICS - 1))), "nothing")
    summary = run(tmp_path, task=Named(names=names), updates=4)
    expected = {name: (i + 1) / 2 for i, name in enumerate(names)} | {"nothing": None}
    (row,) = rows_of(tmp_path, "train")
    assert train_metrics(row) == expected
    assert summary["train_final"] == {"loss": row["loss"], **expected}


def test_the_logged_metric_is_that_of_the_window(tmp_path):
    run(tmp_path / "every", log_every=1, echo__factor=2.0)
    run(tmp_path / "fourth", echo__factor=2.0)
    every, fourth = (
        [row["train_kept"] for row in rows_of(tmp_path / name, "train")]
        for name in ("every", "fourth")
    )
    means = np.reshape(every, (3, 4)).mean(axis=1)
    np.testing.assert_allclose(fourth, means, rtol=1e-6)


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


def test_an_evaluation_that_is_not_finite_meets_no_target():
    rows = [{"eval_loss": value} for value in (None, 3.0, 2.0)]
    met = first_to_meet(rows, metric="loss", mode="min", target=2.5)
    assert met == {"eval_loss": 2.0}


def opened(tmp_path, updates=(), **options):
    """The file of the rows after it has been written with some, and opened again."""
    file = run_folder(tmp_path) / "metrics.jsonl"
    written = MetricsFile(file, resumed_from=None)
    for update in updates:
        written.append({"kind": "train", "updates": update, "loss": float("nan")})
    return lambda: MetricsFile(file, **options)


def lines_of(tmp_path):
    return (tmp_path / "metrics.jsonl").read_bytes().splitlines()


def test_a_resumed_file_forgets_later_rows_and_a_torn_line(tmp_path):
    resume = opened(tmp_path, (2, 4, 6), resumed_from=4)
    assert [read_line(line)["loss"] for line in lines_of(tmp_path)] == [None] * 3
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "tr')
    resumed = resume()
    assert [row["updates"] for row in resumed.rows] == [2, 4]
    resumed.append({"kind": "train", "updates": 6})
    assert [read_line(line)["updates"] for line in lines_of(tmp_path)] == [2, 4, 6]


@pytest.mark.parametrize(
    "damage",
    [
        *(b"{", b"[]", b'{"kind": "train"}', b"\xff"),
        b'{"kind": "train", "updates": "3"}',
    ],
)
def test_a_damaged_line_costs_no_other_row(tmp_path, damage):
    resume = opened(tmp_path, range(1, 6), resumed_from=4, num_rows=4)
    first, second, _, *others = lines_of(tmp_path)
    lines = [first, second, damage, *others, b'{"upd']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    resumed = resume()
    assert [row["updates"] for row in resumed.rows] == [1, 2, 4]
    assert (resumed.damaged, resumed.num_missing) == ([3], 1)


@pytest.mark.parametrize("kept", [3, 5])
def test_rows_that_were_cut_off_at_the_end_of_a_line_are_counted(tmp_path, kept):
    resumed = opened(tmp_path, range(1, kept + 1), resumed_from=4, num_rows=4)()
    assert (resumed.num_missing, resumed.damaged) == (max(0, 4 - kept), [])


def logged(folder, updates, *names):
    config = tiny_config(updates=updates, log_every=1, eval_every=2, checkpoint_every=2)
    config.log.to = names
    return train(config, make_workload(config), folder)


def read(folder):
    """The events by name and step, as TensorBoard reads them: without purged ones."""
    found = {}
    for file in sorted((folder / "tensorboard").iterdir()):
        data = file.read_bytes()
        while data:
            # A length, its checksum, an event, and its checksum.
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            if event.session_log.status == SessionLog.START:
                for steps in found.values():
                    for step in [step for step in steps if step >= event.step]:
                        del steps[step]
            for value in event.summary.value:
                steps = found.setdefault(value.tag, {})
                assert event.step not in steps, value.tag
                steps[event.step] = value
    return found


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        logged(folder, 2, "tensorboard", "wandb")
        return folder, logged(folder, 4, "tensorboard", "wandb")


def test_tensorboard_reads_every_number_of_every_row_once(watched):
    found, wanted = read(watched[0]), {}
    for row in rows_of(watched[0]):
        for name, value in scalars_of(row).items():
            wanted.setdefault(name, {})[row["updates"]] = value
    assert len(wanted["train/loss"]) == 4 and len(wanted["eval/loss"]) == 3
    for name, values in wanted.items():
        events = {step: value.simple_value for step, value in found.pop(name).items()}
        assert events == pytest.approx(values, rel=1e-6), name
    # The others are the config, and a histogram of every array at every evaluation.
    assert found.pop("config/text_summary").keys() == {0}
    assert found and all(name.startswith("params/") for name in found)
    assert all(steps.keys() == {0, 2, 4} for steps in found.values())


def test_wandb_keeps_one_run_of_both_sittings(watched):
    files = sorted(watched[0].glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1
    assert all(file.stat().st_size > 1000 for file in files)


def test_watching_changes_nothing_that_is_computed(watched, tmp_path):
    assert watched[1]["params_sha256"] == logged(tmp_path, 4)["params_sha256"]
    assert not (tmp_path / "tensorboard").exists()


def test_a_logger_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"pip install 'echo-jax\[tensorboard\]'"):
        logged(tmp_path / "run", 2, "tensorboard")
    assert not (tmp_path / "run" / "config.json").exists()


def test_wandb_without_a_login_is_refused_at_once(tmp_path, monkeypatch):
    import wandb  # In a second, which other tests don't need.

    wandb.teardown()  # It keeps what the environment was.
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    message = r"No API key configured.*'wandb login'.*WANDB_MODE=offline"
    with pytest.raises(ValueError, match=message):
        logged(tmp_path / "run", 2, "wandb")
    wandb.teardown()
    assert not (tmp_path / "run").exists()


def test_what_is_done_again_is_shown_once(tmp_path):
    logged(tmp_path, 4, "tensorboard")
    # As after a kill: the last checkpoint is that of update 2.
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    (tmp_path / "summary.json").unlink()
    logged(tmp_path, 4, "tensorboard")
    assert [*read(tmp_path)["train/loss"]] == [1, 2, 3, 4]
