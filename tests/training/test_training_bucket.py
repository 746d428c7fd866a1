"""A run folder in a bucket: from the first file to the last, and back again."""

import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from fake_gcs import Bucket, serve
from test_training_resume import ECHOES, exact
from tiny_workload import ADAPTIVE, run, stop_at

import echo_jax as ej
from echo_jax import cli
from echo_jax.files import FolderError, read_line, run_folder, write
from echo_jax.training import Interrupted, NonFiniteLossError

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
    summaries = [json.loads(both["summary.json"]) for both in (files, others)]
    assert summaries[0]["params_sha256"] == summaries[1]["params_sha256"]


def test_a_run_is_as_in_a_folder_and_no_checkpoint_is_newer_than_the_rows(
    bucket, in_folder
):
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
    assert_same(bucket.files("runs/a"), in_folder)
    assert seen == [(update, [*range(1, update + 1)]) for update in (4, 8, 12)]
    # When it is opened, and before each checkpoint: not for each row.
    assert bucket.writes["runs/a/metrics.jsonl"] == 4
    assert bucket.writes["runs/a/config.json"] == 1


def test_a_run_that_was_killed_in_a_save_is_resumed_as_in_a_folder(bucket, in_folder):
    with pytest.raises(Interrupted) as stopped:
        run(WORKDIR, on_batch=stop_at(6), **RUN)
    assert "summary.json" not in bucket.files("runs/a")
    newest = stopped.value.update
    assert bucket.folders("runs/a/checkpoints") == {"4", str(newest)}
    # Without the object that Orbax writes last.
    del bucket.objects[f"runs/a/checkpoints/{newest}/commit_success.txt"]
    resumed = []
    run(WORKDIR, on_batch=resumed.append, **RUN)
    assert len(resumed) >= 12 - 4
    assert_same(bucket.files("runs/a"), in_folder)


def test_what_others_write_is_seen(bucket):
    folder = run_folder(WORKDIR)
    for name in ("x", "y"):
        bucket.put(f"runs/a/{name}", b"")
        assert (folder / name).exists()
        names = {path.name for path in folder.iterdir()}
        assert names == {*bucket.files("runs/a")}
    bucket.empty()
    assert not (folder / "x").exists() and not folder.is_dir()
    # Large content is written in silence.
    write(folder / "large", content := bytes(range(256)) * 2**14)
    assert bucket.files("runs/a") == {"large": content}


def test_a_run_that_fails_leaves_its_rows(bucket):
    options = {**RUN, "echo__factor": 1.0, "checkpoint_every": 0}
    with pytest.raises(NonFiniteLossError):
        run(WORKDIR, nan_at_fresh=20, **options)
    assert {"train"} <= {row["kind"] for row in rows_of(bucket.files("runs/a"))}


def test_an_adaptive_run_leaves_decisions_that_repeats_it_and_a_profile(
    bucket, tmp_path
):
    first = run(WORKDIR, **ADAPTIVE, profile__updates=2, profile__start=5)
    decisions = bucket.files("runs/a")["decisions.json"]
    assert len(ej.DecisionLog.from_text(decisions)) == 12
    inside = "runs/a/profile/process-0/"
    traces = [name for name in bucket.objects if name.startswith(inside)]
    assert len([name for name in traces if name.endswith(".xplane.pb")]) == 1
    replayed = run(tmp_path, **ADAPTIVE, echo__replay=f"{WORKDIR}/decisions.json")
    assert replayed["params_sha256"] == first["params_sha256"]


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


@pytest.mark.slow
def test_a_trained_model_is_used_and_begun_with_there(bucket, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} bottles of beer on the wall.\n" for i in range(400)))
    fields = f"data.source={text} data.eval_examples=16 mesh.data=1 updates=2 "
    fields += "optim.warmup_updates=0 model.seq_len=16 model.d_model=8 model.d_ff=8 "
    fields += "dispatch.steps=1"
    small = [f"--config.{each}" for each in fields.split()]
    assert cli.main([*LM, WORKDIR, *small]) == 0
    trained = ej.load_run(WORKDIR)
    weights = "gs://bucket/x/model.safetensors"
    assert cli.main(["export", WORKDIR, "--to", "safetensors", "--out", weights]) == 0
    begin = [*LM, "gs://bucket/runs/b", *small, "--config.optim.lr=1e-30"]
    missing = "gs://bucket/x/no.safetensors"
    assert cli.main([*begin, f"--config.init_from={missing}"]) in (1, 2)
    assert f"there is no file '{missing}'" in capsys.readouterr().err
    assert cli.main([*begin, f"--config.init_from={weights}"]) == 0
    found = ej.load_run("gs://bucket/runs/b").variables
    jax.tree.map(np.testing.assert_array_equal, found, trained.variables)


def refused(workdir, capsys):
    assert cli.main([*LM, workdir]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_without_credentials_or_a_package_the_command_says_so(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    key = str(tmp_path / "key.json")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", key)
    line = refused("gs://nobodys/runs/a", capsys)
    assert "gs://nobodys cannot be used: " in line
    assert key in line and "gcloud auth application-default login" in line
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert "pip install 'echo-jax[gcs]'" in refused("gs://other/runs/a", capsys)


def test_what_the_bucket_says_is_said(bucket, monkeypatch, capsys):
    line = refused("gs://missing/runs/a", capsys)
    assert "gs://missing cannot be used: " in line
    assert line.endswith("; make it: gcloud storage buckets create")
    with serve(Bucket("closed", is_closed=True)) as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        assert "roles/storage.objectUser" in refused("gs://closed/runs/a", capsys)
    # Nobody is there any more; there is no long wait for them either.
    assert "gs://gone cannot be used" in refused("gs://gone/runs/a", capsys)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gs://bucket/", "names no folder in a bucket"),
        (Path("gs://bucket/runs/a"), r"gs:/bucket/runs/a is no folder: .* as text"),
        ("s3://bucket/runs/a", "is no folder: give a local path, or gs://"),
    ],
)
def test_what_is_no_run_folder_is_refused(path, message):
    with pytest.raises(FolderError, match=message):
        run_folder(path)
    for local in ("runs/gs:/a", "a:b"):
        assert run_folder(local).as_posix() == local
