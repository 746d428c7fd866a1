import json
import shutil
import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_workload import make_workload, tiny_config

from echo_jax.training import train
from echo_jax.training.records.loggers import open_loggers, scalars_of

LM = {"updates": 4, "log_every": 1, "eval_every": 2}


def run(folder, updates, *names):
    config = tiny_config(**{**LM, "updates": updates, "checkpoint_every": 2})
    config.log.to = names
    return train(config, make_workload(config), folder)


def rows_of(folder):
    return [*map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]


def read(folder):
    """What TensorBoard's own reader finds."""
    found = EventAccumulator(
        str(folder / "tensorboard"), size_guidance={"histograms": 0}
    )
    found.Reload()
    return found


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        run(folder / "run", 2, "tensorboard", "wandb")
        run(folder / "run", 4, "tensorboard", "wandb")
    return folder / "run"


def test_tensorboard_reads_every_number_of_every_row_once(watched):
    found = read(watched)
    rows = rows_of(watched)
    assert len(rows) > 5
    wanted = {}
    for row in rows:
        for name, value in scalars_of(row).items():
            wanted.setdefault(name, {})[row["updates"]] = value
    assert set(found.Tags()["scalars"]) == set(wanted)
    for name, values in wanted.items():
        events = {event.step: event.value for event in found.Scalars(name)}
        assert events.keys() == values.keys(), name
        np.testing.assert_allclose(
            [*events.values()], [*values.values()], rtol=1e-6, err_msg=name
        )


def test_tensorboard_has_a_histogram_of_every_array_at_every_evaluation(watched):
    found = read(watched)
    names = found.Tags()["histograms"]
    assert names and all(name.startswith("params/") for name in names)
    for name in names:
        assert [event.step for event in found.Histograms(name)] == [0, 2, 4]


def test_wandb_keeps_one_run_of_both_sittings(watched):
    files = sorted(watched.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1
    assert all(file.stat().st_size > 1000 for file in files)


def test_what_is_no_number_is_left_out():
    row = {"kind": "train", "updates": 3, "loss": 1.5, "train_accuracy": 0.5}
    others = {"hold_batch": True, "mfu": None, "eval_x": float("nan")}
    assert scalars_of({**row, **others}) == {"train/loss": 1.5, "train/accuracy": 0.5}


def test_watching_changes_nothing_that_is_computed(watched, tmp_path):
    alone = run(tmp_path / "run", 4)
    summary = json.loads((watched / "summary.json").read_text())
    assert summary["params_sha256"] == alone["params_sha256"]
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert open_loggers(tiny_config(), tmp_path, 0) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_logger_that_is_not_installed_is_refused_at_once(name, tmp_path, monkeypatch):
    package = {"tensorboard": "tensorboardX"}.get(name, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"pip install 'echo-jax\[{name}\]'"):
        run(tmp_path / "run", 2, name)
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("key", "why"),
    [(None, "No API key configured"), ("short", "WANDB_API_KEY invalid")],
)
def test_wandb_without_a_login_is_refused_at_once(tmp_path, monkeypatch, key, why):
    import wandb  # In a second, which other tests don't need.

    wandb.teardown()  # It keeps what the environment was.
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    with pytest.raises(ValueError, match=rf"{why}.*'wandb login'.*WANDB_MODE=offline"):
        run(tmp_path / "run", 2, "wandb")
    wandb.teardown()
    assert not (tmp_path / "run").exists()


def test_an_unknown_logger_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'clearml', which is unknown; use tensorboa"):
        run(tmp_path / "run", 2, "clearml")


def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for name in ("tensorboard", "wandb"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OSError, match=f"run/{name} is a link where a folder belon"):
            run(tmp_path / "run", 2, name)
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_what_is_done_again_is_shown_once(tmp_path):
    run(tmp_path, 4, "tensorboard")
    # As after a kill: the last checkpoint is that of update 2.
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    (tmp_path / "checkpoints" / "4.sums.json").unlink(missing_ok=True)
    (tmp_path / "summary.json").unlink()
    run(tmp_path, 4, "tensorboard")
    steps = [event.step for event in read(tmp_path).Scalars("train/loss")]
    assert steps == [1, 2, 3, 4]
