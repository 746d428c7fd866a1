import shutil
import struct
import sys

import pytest
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tiny_workload import make_workload, rows_of, tiny_config

from echo_jax.training import train
from echo_jax.training.records import scalars_of


def run(folder, updates, *names):
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
        run(folder, 2, "tensorboard", "wandb")
        return folder, run(folder, 4, "tensorboard", "wandb")


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


def test_what_is_no_number_is_left_out():
    row = {"kind": "train", "updates": 3, "loss": 1.5, "train_accuracy": 0.5}
    others = {"hold_batch": True, "mfu": None, "eval_x": float("nan")}
    assert scalars_of({**row, **others}) == {"train/loss": 1.5, "train/accuracy": 0.5}


def test_watching_changes_nothing_that_is_computed(watched, tmp_path):
    assert watched[1]["params_sha256"] == run(tmp_path, 4)["params_sha256"]
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize(
    ("name", "package", "said"),
    [
        ("tensorboard", "tensorboardX", r"pip install 'echo-jax\[tensorboard\]'"),
        ("wandb", "wandb", r"pip install 'echo-jax\[wandb\]'"),
        ("clearml", "", "'clearml', which is unknown; use tensorboa"),
    ],
)
def test_a_logger_that_is_not_there_is_refused(
    tmp_path, monkeypatch, name, package, said
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=said):
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


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path, monkeypatch, name):
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
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
    assert [*read(tmp_path)["train/loss"]] == [1, 2, 3, 4]
