"""Several real processes train one run, on CPU collectives."""

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_gcs import Bucket, serve
from tiny_workload import ADAPTIVE, ON_DEVICE, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("all_compiled_soon")]

ROOT = Path(__file__).parents[2]
ONE_DEVICE = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
# Updates of a run that is to be stopped: it must not end before the signal comes.
ENDLESS = 1_000_000
LONG_S = 280  # What takes longer hangs, however busy the machine is.
HOST = {"echo__factor": 2.5, "echo__order": "spread", "echo__buffer": 32}
DEVICE = {**HOST, **ON_DEVICE}
FSDP = {**HOST, "mesh__data": 1, "mesh__fsdp": 2}
DILOCO = {
    **DEVICE,
    "local__sync_schedule": "bernoulli",
    "local__sync_p": 0.2,
    "local__outer": "nesterov",
}
STOPPED = {**HOST, "log_every": 1000, "eval_every": ENDLESS}

# Two processes train several runs, one after another: a start takes longer than a run.
TRAINS = """
import dataclasses, itertools, json, os, sys, time
import grain
import echo_jax as ej
from tiny_workload import make_workload, tiny_config
from echo_jax.data.pipeline import SINGLE
from echo_jax.training import train
from echo_jax.training.processes import connected

process, port = int(sys.argv[1]), sys.argv[2]
where = dict(
    mesh__data=2,
    distributed__coordinator=f"localhost:{port}",
    distributed__num_processes=2,
    distributed__process_id=process,
)


def slow(batch):
    time.sleep(0.1)
    return batch


def stop(number):
    if number == 20 and process:
        os.kill(os.getpid(), 15)


def ending(workload):
    batches = list(itertools.islice(workload.train_dataset(ej.EchoSpec()), 60))
    datasets = iter([batches, batches, batches[: 9 if process else 14]])

    def train_dataset(spec, shard=SINGLE):
        dataset = grain.MapDataset.source(next(datasets)).to_iter_dataset()
        half = slice(4 * shard.index, 4 * shard.index + 4)
        return dataset.map(lambda batch: {k: x[half] for k, x in batch.items()})

    return train_dataset


with connected(tiny_config(**where)):
    for workdir, how, fields in json.loads(sys.argv[3]):
        config, replaced = tiny_config(**where | fields), {}
        workload = make_workload(config, on_batch=stop if how == "stop" else None)
        if how == "slow" and process:
            fresh = workload.fresh_dataset
            replaced["fresh_dataset"] = lambda shard: fresh(shard).map(slow)
        if how == "ends":
            replaced["train_dataset"] = ending(workload)
        if how == "elsewhere" and process:
            workdir += "/other"
        try:
            train(config, dataclasses.replace(workload, **replaced), workdir)
        except ValueError as error:
            if how != "ends":
                raise
            print(error, file=sys.stderr)
"""


def free_port():
    """Returns a port that is free until it is bound, seconds later."""
    while True:
        # Connections are given higher ones.
        port = random.randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("localhost", port)):
            return port


def start(arguments, **options):
    """Starts a process of one device; the first argument is its program."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "training")])
    return subprocess.Popen(
        [sys.executable, "-c", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "NPROC": "4", **ONE_DEVICE},
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def train_together(port, *runs):
    """Has two processes train runs: folder, what happens, and fields of the config."""
    runs = json.dumps([[str(folder), how, fields] for folder, how, fields in runs])
    started = [start([TRAINS, str(process), str(port), runs]) for process in range(2)]
    found = [process.communicate(timeout=LONG_S)[1] for process in started]
    return [process.returncode for process in started], found


def summary_of(workdir):
    return json.loads((workdir / "summary.json").read_text())


def last_saved(names):
    return max(int(name) for name in names if name.isdigit())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of two processes, some of which were stopped, and how the last one ended."""
    folder, bucket = tmp_path_factory.mktemp("together"), Bucket("bucket")
    with serve(bucket) as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", address)
        shared = "gs://bucket/runs/two"
        codes, errors = train_together(
            free_port(),
            (folder / "host", "", HOST | {"profile__start": 2, "profile__updates": 2}),
            (folder / "fsdp", "", FSDP),
            (folder / "diloco", "", DILOCO),
            (folder / "adaptive", "slow", ADAPTIVE | {"updates": 40}),
            (folder / "parts", "", DEVICE | {"updates": 5}),
            (shared, "stop", STOPPED | {"updates": ENDLESS}),
        )
        assert "stopped by SIGTERM after update" in errors[0], errors
        assert "summary.json" not in bucket.files("runs/two")
        stopped = last_saved(bucket.folders("runs/two/checkpoints"))
        shutil.copytree(folder / "parts", folder / "alone")
        after = STOPPED | {"updates": stopped + 5}
        codes, errors = train_together(
            free_port(),
            (shared, "", after),
            (folder / "whole", "", after),
            (folder / "parts", "", DEVICE),
            (folder / "ends", "ends", {"updates": 40}),
            (folder / "seen", "elsewhere", {}),
        )
        files = bucket.files("runs/two")
    return SimpleNamespace(
        folder=folder,
        codes=codes,
        errors=errors,
        resumed=json.loads(files["summary.json"]),
        writes=bucket.writes["runs/two/summary.json"],
    )


def assert_same_run(found, other):
    """The same items, used as often; sums over other devices round differently."""
    for name in ("updates", "fresh", "repeats", "bytes_sent"):
        assert found[name] == other[name]
    assert found["final"]["loss"] == pytest.approx(other["final"]["loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "fields"), [("host", HOST), ("fsdp", FSDP), ("diloco", DILOCO)]
)
def test_processes_train_as_one_would_with_as_many_shards(
    tmp_path, trained, name, fields
):
    alone = run(tmp_path, **{"mesh__data": 2, **fields}, data__shards=2)
    assert_same_run(summary_of(trained.folder / name), alone)
    environment = json.loads((trained.folder / name / "environment.json").read_text())
    assert environment["processes"] == 2 and len(environment["devices"]) == 2


def test_each_process_traces_its_own_device(trained):
    traced = sorted(path.name for path in (trained.folder / "host/profile").iterdir())
    assert traced == ["process-0", "process-1"]


def test_a_process_with_slow_storage_echoes_while_the_other_reads(trained):
    """Adaptive: each decides for its lanes, and all end with equal parameters."""
    found = summary_of(trained.folder / "adaptive")
    assert found["updates"] == 40
    assert found["fresh"] + found["repeats"] == 40 * 8
    first, second = (
        json.loads((trained.folder / "adaptive" / name).read_text())
        for name in ("decisions.json", "decisions-1.json")
    )
    assert first != second and found["repeats"] > 0


def test_a_run_stopped_in_a_bucket_goes_on_to_the_same_parameters(trained):
    whole = summary_of(trained.folder / "whole")
    for name in ("params_sha256", "updates", "fresh", "repeats"):
        assert trained.resumed[name] == whole[name]
    # One process wrote it.
    assert trained.writes == 1


def test_two_processes_become_one_which_makes_the_shards_of_both(trained):
    alone = run(trained.folder / "alone", **DEVICE, mesh__data=2)
    assert_same_run(summary_of(trained.folder / "parts"), alone)


def test_streams_that_end_at_different_places_end_together(trained):
    for errors in trained.errors:
        assert "ended after 9 updates; it must repeat without end" in errors
    # What was trained past the end is logged and saved nowhere.
    rows = (trained.folder / "ends" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(row)["updates"] for row in rows) <= 8


def test_a_process_that_sees_another_folder_ends_all(trained):
    assert trained.codes == [1, 1]
    for errors in trained.errors:
        assert f"process 1 of 2 does not see {trained.folder}/seen" in errors


HANGS = """
import os, sys, threading
from echo_jax import cli
from echo_jax.training.feeds import HostFeed
take, updates = HostFeed.take, []
def hangs(feed, num_updates):
    updates.append(num_updates)
    return threading.Event().wait() if sum(updates) == 25 else take(feed, num_updates)
if sys.argv[-1].endswith("process_id=1"):
    HostFeed.take = hangs
sys.exit(cli.main())
"""
SMALL = {"data.eval_examples": 16, "model.num_layers": 1, "model.seq_len": 16}
SMALL |= {"model.d_ff": 64, "updates": ENDLESS, "checkpoint_every": 16}


def test_where_the_data_of_one_hangs_it_ends_and_the_others_after_it(tmp_path):
    fields = {**SMALL, "data.timeout_s": 3.0, "distributed.num_processes": 2}
    fields["distributed.coordinator"] = f"localhost:{free_port()}"
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    flags += ["--config=configs/lm.py:tiny", f"--workdir={tmp_path}"]
    started = [
        start([HANGS, "train", *flags, f"--config.distributed.process_id={process}"])
        for process in range(2)
    ]
    ends = [process.communicate(timeout=LONG_S)[1] for process in started]
    *_, sentence, again = ends[1].splitlines()
    assert started[1].returncode == 75, ends
    assert "echo-jax train: waited for the input of update 25 since" in sentence
    assert again.startswith("  echo-jax train --config.")
    assert started[0].returncode not in (0, None)
    saved = (path.name for path in (tmp_path / "checkpoints").iterdir())
    assert last_saved(saved) == 16
    assert not (tmp_path / "summary.json").exists()


def test_one_process_of_a_job_of_four_says_whom_it_waits_for(tmp_path, monkeypatch):
    tasks = {"NTASKS": "2(x2)", "PROCID": "0", "LOCALID": "0", "JOB_ID": "7"}
    for name, value in {**tasks, "STEP_NODELIST": "localhost"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    argv = ["train", "--config=configs/lm.py:tiny", f"--workdir={tmp_path}/run"]
    code = "import sys; from echo_jax import cli; sys.exit(cli.main())"
    process = start([code, *argv], stdout=subprocess.PIPE)
    said = next(line for line in process.stdout if "waiting" in line)
    process.kill()
    process.communicate()
    assert "the other processes of SLURM_NTASKS=2(x2) SLURM_PROCID=0 " in said
    assert "train in one with --config.distributed.detect=False" in said
