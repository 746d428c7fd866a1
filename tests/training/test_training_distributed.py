"""Several real processes train one run: `launch_tpu.sh local`, on CPU collectives."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest
from fake_gcs import Bucket, serve

from echo_jax.config.saved import read_config
from echo_jax.files.folders import run_folder
from echo_jax.files.json_files import unseal
from echo_jax.training.saving.checkpoint import Checkpoints
from echo_jax.training.trainer import compile_functions
from echo_jax.workloads import lm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("all_compiled_soon")]

ROOT = Path(__file__).parents[2]
SPREAD = {"echo.factor": 2.5, "echo.order": "spread", "echo.buffer": 64}
ON_HOST = {**SPREAD, "echo.after": "decode"}
ONE_DEVICE = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
ON_DEVICE = {**SPREAD, "echo.after": "decode", "echo.where": "device"}
# Updates of a run that is to be stopped: it must not end before the signal comes.
ENDLESS = 1_000_000
LONG_S = 600  # What takes longer hangs, however busy the machine is.


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """An `echo-jax` of this checkout, which starts by its module."""
    folder = tmp_path_factory.mktemp("command")
    path = folder / "echo-jax"
    path.write_text(
        f'#!/bin/sh\nexport PYTHONPATH={ROOT}\nexec {sys.executable} -m echo_jax "$@"\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def free_port():
    """Free until it is bound, seconds later: connections are given higher ones."""
    while True:
        port = random.randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("localhost", port)):
            return port


def flags_of(overrides):
    # The learning rate is the same wherever a run ends.
    fields = {"updates": 60, "optim.decay_updates": 60, "data.eval_examples": 16}
    # Most of the time goes into starts, of which some tests have ten.
    fields |= {"model.num_layers": 1, "model.seq_len": 16, "model.d_ff": 64}
    return [
        f"--config.{name}={value}" for name, value in {**fields, **overrides}.items()
    ]


def start(command, workdir, processes=2, log_dir=None, **overrides):
    flags = flags_of(overrides)
    return subprocess.Popen(
        [
            str(ROOT / "launch_tpu.sh"),
            "local",
            f"--processes={processes}",
            f"--log-dir={log_dir or f'{workdir}_logs'}",
            "--",
            "--config=configs/lm.py:tiny",
            f"--workdir={workdir}",
            *flags,
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "ECHO_JAX_COMMAND": str(command),
            **ONE_DEVICE,
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(launched, *, code=0):
    _, errors = launched.communicate(timeout=LONG_S)
    assert launched.returncode == code, errors


def alone(command, workdir, **overrides):
    """Trains in one process, without the launcher."""
    flags = flags_of(overrides)
    config = ["--config", "configs/lm.py:tiny", "--workdir", str(workdir)]
    subprocess.run(
        [str(command), "train", *config, *flags],
        cwd=ROOT,
        env={**os.environ, **ONE_DEVICE},
        check=True,
        capture_output=True,
        timeout=LONG_S,
    )


def summary(workdir):
    return unseal(json.loads((workdir / "summary.json").read_text()))


def counts(workdir):
    found = summary(workdir)
    return [found[name] for name in ("updates", "fresh", "repeats")]


def assert_same_run(workdir, other):
    """The same items, used as often; sums over other devices round differently."""
    assert counts(workdir) == counts(other)
    losses = [summary(each)["final"]["loss"] for each in (workdir, other)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def params(workdir):
    """The parameters that a run of two devices ended with, on two of this process."""
    config = read_config(run_folder(workdir))
    config.mesh.data = 2
    compiled = compile_functions(config, lm.build(config))
    with closing(Checkpoints(run_folder(workdir) / "checkpoints", keep=1)) as saved:
        restored = saved.restore_newest(compiled.abstract_state)
    assert restored.update == config.updates
    return jax.device_get(compiled.model(restored.state).params)


def stopped_after(update, command, workdir, **options):
    """Stops a run as a pre-emption does, past an update; returns where it ended."""
    launched = start(command, workdir, **{**options, "updates": ENDLESS})
    wait_for_update(workdir, update)
    launched.send_signal(signal.SIGTERM)
    finish(launched, code=143)
    return last_saved(path.name for path in (workdir / "checkpoints").iterdir())


def last_saved(names):
    return max(int(name) for name in names if name.isdigit())


def wait_for_update(workdir, update):
    """Waits until a run has logged an update."""
    file = workdir / "metrics.jsonl"
    wait_for(lambda: file.exists() and f'"updates": {update},' in file.read_text())


def wait_for(is_true):
    end = time.monotonic() + LONG_S
    while not is_true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.1)


def test_a_stopped_run_goes_on_to_the_same_parameters(tmp_path, command):
    """An echo on the devices; one on the host does in a bucket, below."""
    ended = stopped_after(20, command, tmp_path / "broken", **ON_DEVICE)
    echo = {**ON_DEVICE, "updates": ended + 20}
    finish(start(command, tmp_path / "whole", **echo))
    saved = tmp_path / "saved"
    shutil.copytree(tmp_path / "broken", saved)
    finish(start(command, tmp_path / "broken", **echo))
    whole, broken = summary(tmp_path / "whole"), summary(tmp_path / "broken")
    assert whole["params_sha256"] == broken["params_sha256"]
    assert counts(tmp_path / "whole") == counts(tmp_path / "broken")
    assert whole["fresh"] + whole["repeats"] == echo["updates"] * 32
    # Two processes become one, which makes the shards of both.
    alone(command, saved, **echo)
    assert_same_run(saved, tmp_path / "whole")


# That a run goes on with fewer processes was just seen of two.
@pytest.mark.exhaustive
@pytest.mark.parametrize("echo", [ON_HOST, ON_DEVICE], ids=["host", "device"])
def test_four_processes_become_two(tmp_path, command, echo):
    echo = {**echo, "log_every": 4}
    ended = stopped_after(8, command, tmp_path / "fewer", processes=4, **echo)
    echo["updates"] = ended + 20
    # Four would train as one does with as many parts: see the next test.
    alone(command, tmp_path / "four", **echo, **{"data.shards": 4})
    finish(start(command, tmp_path / "fewer", **echo))
    assert_same_run(tmp_path / "fewer", tmp_path / "four")


def test_processes_train_as_one_would_with_as_many_shards(tmp_path, command):
    echo = {**ON_HOST, "updates": 30, "profile.updates": 3}
    finish(start(command, tmp_path / "two", **echo, **{"mesh.fsdp": 2}))
    alone(command, tmp_path / "one", **echo, **{"data.shards": 2})
    assert_same_run(tmp_path / "two", tmp_path / "one")
    environment = json.loads((tmp_path / "two" / "environment.json").read_text())
    assert environment["processes"] == 2 and len(environment["devices"]) == 2
    # Each traced its own device.
    traced = sorted(path.name for path in (tmp_path / "two" / "profile").iterdir())
    assert traced == ["process-0", "process-1"]


def test_replicas_of_two_processes_meet(tmp_path, command):
    """Always: then they train as one model. Now and then: to the bit after a stop."""
    sgd = {"optim.name": "sgd", "optim.clip_norm": 0.0, "updates": 20}
    local = {**sgd, "local.schedule": "every"}
    alone(command, tmp_path / "whole", **sgd, **{"data.shards": 2})
    finish(start(command, tmp_path / "local", **local))
    assert_same_run(tmp_path / "local", tmp_path / "whole")
    one, other = params(tmp_path / "local"), params(tmp_path / "whole")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), one, other
    )

    diloco = {**ON_DEVICE, "local.schedule": "bernoulli", "local.p": 0.2}
    diloco |= {"local.outer": "nesterov", "log_every": 5, "checkpoint_every": 10}
    ended = stopped_after(20, command, tmp_path / "broken", **diloco)
    diloco["updates"] = ended + 20
    finish(start(command, tmp_path / "one", **diloco))
    finish(start(command, tmp_path / "broken", **diloco))
    one, broken = summary(tmp_path / "one"), summary(tmp_path / "broken")
    assert one["params_sha256"] == broken["params_sha256"]
    assert one["bytes_sent"] == broken["bytes_sent"] > 0


def test_a_process_with_slow_storage_echoes_while_the_other_reads(tmp_path, command):
    """Adaptive: each decides for its lanes, and all end with equal parameters."""
    slow = tmp_path / "slow"
    # The second process alone reads slowly.
    slow.write_text(
        "#!/bin/sh\n"
        'case "$*" in *process_id=1*) more=--config.data.storage.latency_s=0.02\n'
        f'esac\nexec {command} "$@" $more\n'
    )
    slow.chmod(0o755)
    echo = {
        "echo.where": "device",
        "echo.after": "decode",
        "echo.mode": "adaptive",
        "echo.buffer": 256,
    }
    # The processes compare the hashes of their parameters before they end.
    finish(start(slow, tmp_path / "run", **echo))
    found = summary(tmp_path / "run")
    # The first one hardly repeats; the second, which reads slowly, must.
    assert found["updates"] == 60
    assert found["fresh"] + found["repeats"] == 60 * 32
    tapes = [
        json.loads((tmp_path / "run" / name).read_text())
        for name in ("tape.json", "tape-1.json")
    ]
    assert tapes[0] != tapes[1] and found["repeats"] > 60


ENDING = """
import dataclasses, itertools, sys
import grain
from tiny_workload import make_workload, tiny_config
from echo_jax.echo.shard import SINGLE
from echo_jax.echo.spec import EchoSpec
from echo_jax.training import train
from echo_jax.training.processes.distributed import connected

process, workdir, port = int(sys.argv[1]), sys.argv[2], sys.argv[3]
config = tiny_config(
    updates=40,
    mesh__data=2,
    distributed__coordinator=f"localhost:{port}",
    distributed__num_processes=2,
    distributed__process_id=process,
)
workload = make_workload(config)
batches = list(itertools.islice(workload.train_dataset(EchoSpec()), 60))
datasets = iter([batches, batches, batches[: 9 if process else 14]])


def train_dataset(spec, shard=SINGLE):
    dataset = grain.MapDataset.source(next(datasets)).to_iter_dataset()
    half = slice(4 * shard.index, 4 * shard.index + 4)
    return dataset.map(lambda batch: {k: x[half] for k, x in batch.items()})


ending = dataclasses.replace(workload, train_dataset=train_dataset)
with connected(config):
    train(config, ending, workdir)
"""


def test_streams_that_end_at_different_places_end_together(tmp_path, free_port):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "training")])
    command = [sys.executable, "-c", ENDING]
    processes = [
        subprocess.Popen(
            [*command, str(number), str(tmp_path / "run"), str(free_port)],
            env={**os.environ, "PYTHONPATH": paths, "NPROC": "4", **ONE_DEVICE},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=LONG_S)
        assert "ended after 9 updates; it must repeat without end" in errors
        assert process.returncode == 1
    # What was trained past the end is logged and saved nowhere.
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(row)["updates"] for row in rows) <= 8


def test_a_process_that_fails_ends_the_others(tmp_path, command):
    """A real one that starts with what cannot be: the other must not wait for it."""
    failing = tmp_path / "failing"
    failing.write_text(
        "#!/bin/sh\n"
        'case "$*" in *process_id=1*) more=--config.data.source=/nowhere\n'
        f'esac\nexec {command} "$@" $more\n'
    )
    failing.chmod(0o755)
    launched = start(failing, tmp_path / "run")
    finish(launched, code=1)
    assert "/nowhere" in (tmp_path / "run_logs" / "process-1.log").read_text()
    assert not (tmp_path / "run" / "summary.json").exists()


def test_a_folder_that_is_not_shared_is_refused(tmp_path, command):
    apart = tmp_path / "apart"
    # A machine of its own has a disk of its own.
    apart.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *process_id=1*) more=--workdir={tmp_path}/other\n'
        f'esac\nexec {command} "$@" $more\n'
    )
    apart.chmod(0o755)
    finish(start(apart, tmp_path / "run"), code=1)
    log = (tmp_path / "run_logs" / "process-1.log").read_text()
    assert f"process 1 of 2 does not see {tmp_path}/other" in log


def test_a_run_stopped_in_a_bucket_goes_on_as_in_a_folder(
    tmp_path, command, monkeypatch
):
    echo = {**ON_HOST, "checkpoint_every": 8}
    bucket, committed = Bucket("bucket"), threading.Event()

    def look(name):
        if name == "runs/two/checkpoints/8/commit_success.txt":
            committed.set()

    bucket.on_put = look
    with serve(bucket) as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        shared = "gs://bucket/runs/two"
        options = {"log_dir": tmp_path / "logs", **echo}
        launched = start(command, shared, **{**options, "updates": ENDLESS})
        assert committed.wait(timeout=LONG_S)
        launched.send_signal(signal.SIGTERM)
        finish(launched, code=143)
        assert "summary.json" not in bucket.files("runs/two")
        options["updates"] = last_saved(bucket.folders("runs/two/checkpoints")) + 8
        finish(start(command, shared, **options))
    resumed = unseal(json.loads(bucket.files("runs/two")["summary.json"]))
    options["log_dir"] = tmp_path / "logs_of_whole"
    finish(start(command, tmp_path / "whole", **options))
    whole = summary(tmp_path / "whole")
    for name in ("params_sha256", "updates", "fresh", "repeats"):
        assert resumed[name] == whole[name]
    # One process wrote it.
    assert bucket.writes["runs/two/summary.json"] == 1


# Hangs before an update, as data does that does not come.
HANGS = """
import sys, threading
from echo_jax import cli
from echo_jax.training.feeds.feed import HostFeed
take, updates = HostFeed.take, []
def hang(feed, num_updates):
    updates.append(num_updates)
    if sum(updates) == 25:
        open(__file__ + ".hangs", "w").close()
        threading.Event().wait()
    return take(feed, num_updates)
HostFeed.take = hang
sys.exit(cli.main())
"""


@pytest.fixture
def hanging(tmp_path, command):
    """An `echo-jax` whose process 1 gets no data for update 25."""
    code, path = tmp_path / "hangs.py", tmp_path / "hanging"
    code.write_text(HANGS)
    path.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *process_id=1*) exec env PYTHONPATH={ROOT} '
        f'{sys.executable} {code} "$@"\nesac\nexec {command} "$@"\n'
    )
    path.chmod(0o755)
    return path


def last_sentence(tmp_path, process):
    lines = (tmp_path / f"run_logs/process-{process}.log").read_text().splitlines()
    sentence, again = lines[-2:]
    assert again.startswith("  echo-jax train --config=")
    return sentence


UNSAVED = {"updates": ENDLESS, "checkpoint_every": 16}
LOST = (
    "not saved: {}a save takes all processes; "
    "the last checkpoint, of update 16, stands, and 8 updates are lost"
)


def test_one_whose_data_does_not_come_ends_all(tmp_path, hanging):
    launched = start(hanging, tmp_path / "run", **UNSAVED, **{"data.timeout_s": 3.0})
    finish(launched, code=75)
    said = last_sentence(tmp_path, 1)
    assert "train: process 1 of 2 waited for the input of update 25 since" in said
    assert said.endswith(LOST.format(""))
    assert last_sentence(tmp_path, 0) == said
    saved = (path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert last_saved(saved) == 16


def test_a_signal_ends_all_where_the_data_of_one_hangs(tmp_path, hanging):
    launched = start(hanging, tmp_path / "run", **UNSAVED)
    wait_for((tmp_path / "hangs.py.hangs").exists)
    launched.send_signal(signal.SIGTERM)
    finish(launched, code=143)
    said = last_sentence(tmp_path, 1)
    assert "train: stopped by SIGTERM after update 24, and not saved: process 1" in said
    assert said.endswith(", and a save" + LOST.format("").partition("a save")[2])
    assert last_sentence(tmp_path, 0) == said


def start_and_kill(tmp_path, command, killed):
    noting, pid = tmp_path / "noting", tmp_path / "pid"
    noting.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *process_id={killed}*) echo $$ >{pid}\n'
        f'esac\nexec {command} "$@"\n'
    )
    noting.chmod(0o755)
    launched = start(noting, tmp_path / "run", updates=ENDLESS)
    wait_for_update(tmp_path / "run", 20)
    os.kill(int(pid.read_text()), signal.SIGKILL)
    finish(launched, code=137)


def test_one_that_is_killed_ends_the_other_with_a_sentence(tmp_path, command):
    start_and_kill(tmp_path, command, killed=1)
    assert "process 1 of 2 gives no sign since" in last_sentence(tmp_path, 0)


def test_where_the_first_one_is_killed_the_last_line_is_a_sentence(tmp_path, command):
    start_and_kill(tmp_path, command, killed=0)
    assert "process 0 of 2 does not answer any more: it" in last_sentence(tmp_path, 1)
