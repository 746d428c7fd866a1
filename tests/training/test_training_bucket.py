"""A run folder in a bucket: from the first file to the last, and back again."""

import io
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from etils.epath import gpath
from fake_gcs import Bucket, serve
from test_training_resume import ECHOES, exact
from tiny_workload import run, stop_at

import echo_jax as ej
from echo_jax import cli
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.files.bucket import _open, open_bucket
from echo_jax.files.folders import FolderError, RunPath, run_folder
from echo_jax.files.json_files import read_line, unseal
from echo_jax.training import Interrupted
from echo_jax.training.finite import NonFiniteLossError
from echo_jax.training.records import runfiles
from echo_jax.training.records.runfiles import MetricsFile
from echo_jax.training.saving.checkpoint import params_sha256
from echo_jax.training.saving.saved_model import read_model
from echo_jax.training.saving.weights import read_weights, write_weights

ROOT = Path(__file__).parents[2]
WORKDIR = "gs://bucket/runs/a"
RUN = {**ECHOES["spread"], "log_every": 1, "checkpoint_every": 4}
LM = ["train", "--config", f"{ROOT}/configs/lm.py:tiny", "--workdir"]


@pytest.fixture(scope="module")
def in_folder(tmp_path_factory):
    """The files of a run that was never stopped, in a folder."""
    folder = tmp_path_factory.mktemp("local") / "a"
    run(folder, **RUN)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def rows_of(files):
    return [read_line(line) for line in files["metrics.jsonl"].splitlines()]


def assert_same(files, others):
    """Asserts that two run folders hold the same run, but for its times."""
    assert files.keys() == others.keys()
    assert files["config.json"] == others["config.json"]
    assert [*map(exact, rows_of(files))] == [*map(exact, rows_of(others))]
    summaries = [unseal(json.loads(both["summary.json"])) for both in (files, others)]
    assert summaries[0]["params_sha256"] == summaries[1]["params_sha256"]


def test_stopped_and_resumed_as_in_a_folder(bucket, in_folder):
    with pytest.raises(Interrupted):
        run(WORKDIR, on_batch=stop_at(6), **RUN)
    assert "summary.json" not in bucket.files("runs/a")
    run(WORKDIR, **RUN)
    assert_same(bucket.files("runs/a"), in_folder)
    assert bucket.writes["runs/a/config.json"] == 1


def test_its_model_is_read_alone(bucket):
    summary = run(WORKDIR, **RUN)
    before = bucket.files("runs/a")
    found = read_model(run_folder(WORKDIR))
    assert found.update == summary["updates"]
    assert params_sha256(found.model.params) == summary["params_sha256"]
    assert read_model(run_folder(WORKDIR), 8).update == 8
    assert bucket.files("runs/a") == before


def test_a_client_that_was_chosen_before_is_not_used(bucket, monkeypatch):
    with monkeypatch.context() as patch:
        # As a program that has saved something else has looked already.
        patch.delenv("EPATH_USE_TF")
        gpath._is_tf_installed.cache_clear()
        assert epath.Path(ROOT).exists()
    _open.cache_clear()
    bucket.put("runs/a/x", b"content")
    assert (open_bucket(WORKDIR) / "x").read_bytes() == b"content"


def test_killed_before_a_checkpoint_was_whole(bucket, in_folder):
    with pytest.raises(Interrupted) as stopped:
        run(WORKDIR, on_batch=stop_at(6), **RUN)
    newest = stopped.value.update
    assert bucket.folders("runs/a/checkpoints") == {"4", str(newest)}
    # The object that Orbax writes last.
    del bucket.objects[f"runs/a/checkpoints/{newest}/commit_success.txt"]
    resumed = []
    run(WORKDIR, on_batch=resumed.append, **RUN)
    assert len(resumed) >= 12 - 4
    assert_same(bucket.files("runs/a"), in_folder)


def test_a_checkpoint_is_never_newer_than_the_rows(bucket):
    seen = []

    def look(name):
        parts = name.split("/")
        if parts[2] == "checkpoints" and parts[4:] == ["commit_success.txt"]:
            rows = rows_of(bucket.files("runs/a"))
            logged = [row["updates"] for row in rows if row["kind"] == "train"]
            # The save goes on in the background, so that more rows may be there.
            seen.append((int(parts[3]), logged[: int(parts[3])]))

    bucket.on_put = look
    run(WORKDIR, **RUN)
    assert seen == [(update, [*range(1, update + 1)]) for update in (4, 8, 12)]
    # When it is opened, and before each checkpoint: not for each row.
    assert bucket.writes["runs/a/metrics.jsonl"] == 4


def test_what_others_write_is_seen(bucket):
    folder = run_folder(WORKDIR)
    for name in ("x", "y"):
        bucket.put(f"runs/a/{name}", b"")
        assert (folder / name).exists()
        names = {path.name for path in folder.for_others().iterdir()}
        assert names == {*bucket.files("runs/a")}
    bucket.empty()
    assert not (folder / "x").exists() and not folder.is_dir()


def test_rows_are_written_after_a_while_and_when_asked(bucket, monkeypatch):
    path = run_folder(WORKDIR) / "metrics.jsonl"
    metrics = MetricsFile(path, resumed_from=None)
    metrics.append({"kind": "train", "updates": 1})
    assert rows_of(bucket.files("runs/a")) == []
    monkeypatch.setattr(runfiles, "_WRITE_EVERY_S", 0.0)
    metrics.append({"kind": "train", "updates": 2})
    assert len(rows_of(bucket.files("runs/a"))) == 2
    monkeypatch.undo()
    metrics.append({"kind": "train", "updates": 3})
    metrics.flush()
    metrics.flush()
    assert rows_of(bucket.files("runs/a")) == metrics.rows
    assert bucket.writes["runs/a/metrics.jsonl"] == 3


def test_one_process_writes_the_rows_that_all_read(bucket):
    path = run_folder(WORKDIR) / "metrics.jsonl"
    first = MetricsFile(path, resumed_from=None)
    for update in (1, 2, 3):
        first.append({"kind": "train", "updates": update})
    first.flush()
    before = dict(bucket.objects)
    other = MetricsFile(path, resumed_from=2, writes=False)
    other.append({"kind": "train", "updates": 3})
    other.flush()
    assert other.rows == first.rows
    assert bucket.objects == before


def test_a_run_that_fails_leaves_its_rows(bucket):
    options = {**RUN, "echo__factor": 1.0, "checkpoint_every": 0}
    with pytest.raises(NonFiniteLossError):
        run(WORKDIR, nan_at_fresh=20, **options)
    assert {"train"} <= {row["kind"] for row in rows_of(bucket.files("runs/a"))}


def test_an_adaptive_run_leaves_a_tape_that_repeats_it(bucket, tmp_path):
    adaptive = {
        "echo__mode": "adaptive",
        "echo__where": "device",
        "echo__after": "decode",
        "echo__buffer": 40,
    }
    first = run(WORKDIR, **adaptive)
    tape = bucket.files("runs/a")["tape.json"]
    tape = DecisionLog.read(io.BytesIO(tape), name="tape.json")
    assert len(tape) == 12
    replayed = run(tmp_path, **adaptive, echo__replay=f"{WORKDIR}/tape.json")
    assert replayed["params_sha256"] == first["params_sha256"]


def test_a_profile_is_there_too(bucket):
    def traces():
        mine = "runs/a/profile/process-0/"
        names = [name for name in bucket.objects if name.startswith(mine)]
        return [name for name in names if name.endswith(".xplane.pb")]

    fields = {**RUN, "profile__updates": 2, "profile__start": 5}
    with pytest.raises(Interrupted) as stopped:
        run(WORKDIR, on_batch=stop_at(10), **fields)
    (first,) = traces()
    # Done again, from a checkpoint before them, the updates are traced again.
    for update in {"8", str(stopped.value.update)}:
        del bucket.objects[f"runs/a/checkpoints/{update}/commit_success.txt"]
    content = bucket.objects[first]
    run(WORKDIR, **fields)
    (again,) = traces()
    assert bucket.objects[again] != content


def test_a_large_file_is_written_in_silence(bucket):
    content = bytes(range(256)) * 2**14
    (run_folder("gs://bucket/runs/a") / "large").write(content)
    assert bucket.files("runs/a") == {"large": content}


def test_a_report_reads_and_writes_there(bucket, tmp_path, capsys):
    study = tmp_path / "quickstart"
    shutil.copytree(ROOT / "results/quickstart", study)
    for path in study.rglob("*.json*"):
        bucket.put(str(path.relative_to(tmp_path)), path.read_bytes())
    assert cli.main(["report", "gs://bucket/quickstart"]) == 0
    assert "gs://bucket/quickstart/report.html" in capsys.readouterr().out
    assert cli.main(["report", str(study)]) == 0
    written = bucket.files("quickstart")
    for name in ("table.md", "report.html", "figure.png", "figure.svg"):
        assert written[name] == (study / name).read_bytes(), name


def refused(workdir, capsys):
    """The one line that says why a command is refused."""
    assert cli.main([*LM, workdir]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.slow
def test_a_trained_model_is_used_and_begun_with_there(bucket, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} bottles of beer on the wall.\n" for i in range(400)))
    fields = f"data.source={text} data.eval_examples=16 mesh.data=1 updates=2 "
    fields += "optim.warmup_updates=0 model.seq_len=16 model.d_model=8 model.d_ff=8 "
    fields += "dispatch.mode=loop dispatch.steps=1"
    small = [f"--config.{each}" for each in fields.split()]
    assert cli.main([*LM, WORKDIR, *small]) == 0
    trained = ej.load_run(WORKDIR)
    weights = "gs://bucket/x/model.safetensors"
    assert cli.main(["export", WORKDIR, "--to", "safetensors", "--out", weights]) == 0
    begun = [*LM, "gs://bucket/runs/b", *small, "--config.optim.lr=1e-30"]
    assert cli.main([*begun, f"--config.init_from={weights}"]) == 0
    found = ej.load_run("gs://bucket/runs/b").variables
    jax.tree.map(np.testing.assert_array_equal, found, trained.variables)
    write_weights(weights, {"params": {"x": jnp.ones(3, jnp.bfloat16)}}, {})
    assert read_weights(weights)["params/x"].tolist() == [1, 1, 1]
    missing = "gs://bucket/x/no.safetensors"
    with pytest.raises(FolderError, match=f"there is no file '{missing}'"):
        read_weights(missing)
    bucket.put("x/no.safetensors", b"something else")
    with pytest.raises(FolderError, match=f"'{missing}' is no file of safetensors"):
        read_weights(missing)


def test_without_credentials_the_command_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    key = str(tmp_path / "key.json")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", key)
    line = refused("gs://nobodys/runs/a", capsys)
    assert "gs://nobodys cannot be used: there are no Google Cloud credentials" in line
    assert key in line and "gcloud auth application-default login" in line


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert "pip install 'echo-jax[gcs]'" in refused("gs://other/runs/a", capsys)


def test_what_the_bucket_says_is_said(bucket, monkeypatch, capsys):
    line = refused("gs://missing/runs/a", capsys)
    assert "gs://missing cannot be used: there is no such bucket" in line
    with serve(Bucket("closed", is_closed=True)) as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        assert "roles/storage.objectUser" in refused("gs://closed/runs/a", capsys)
    # Nobody is there any more; there is no long wait for them either.
    assert "gs://gone cannot be used" in refused("gs://gone/runs/a", capsys)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gs://bucket", "names no folder in a bucket"),
        ("gs://bucket/", "names no folder in a bucket"),
        ("gs:///runs/a", "names no folder in a bucket"),
        (Path("gs://bucket/runs/a"), r"gs:/bucket/runs/a is no folder: .* as text"),
        ("s3://bucket/runs/a", "is no folder: give a local path, or gs://"),
    ],
)
def test_what_is_no_run_folder_is_refused(path, message):
    with pytest.raises(FolderError, match=message):
        run_folder(path)


@pytest.mark.parametrize("path", ["runs/a", "/runs/a", "runs/gs:/a", "a:b", Path("a")])
def test_a_local_folder_stays_what_it_is(path):
    assert run_folder(path) == RunPath(Path(path))
