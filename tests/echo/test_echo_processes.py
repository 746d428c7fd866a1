"""Two real processes share an echo on their devices."""

import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from echo_cases import ORDERS, mesh_of

import echo_jax as ej

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ROWS, BATCHES = 8, 12
FETCH = ej.FetchSchedule(start=0.5, end=0.5)
SPECS = {
    **{order: ej.EchoSpec("5/2", 64, order, ROWS, seed=3) for order in ORDERS},
    "stochastic": ej.StochasticSpec(FETCH, 64, ROWS, seed=3),
    "adaptive": ej.AdaptiveSpec(3, 64, ROWS, seed=3),
}
# The shape of a mesh, whether the devices of a process are neighbours along its second
# axis, that axis, the axes that split the rows, and the kind of axes.
MESHES = {
    "data": ((-1, 1), True, "model", "data", "Auto"),
    "model": ((2, 2), True, "model", "data", "Auto"),
    "model over processes": ((2, 2), False, "model", "data", "Explicit"),
    "fsdp": ((2, 2), True, "fsdp", ("data", "fsdp"), "Explicit"),
    "no neighbours": ((2, 2), False, "fsdp", ("data", "fsdp"), "Auto"),
}
PROGRAM = """
import json, sys
import jax, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
process, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", 2, process)
import echo_jax as ej
from test_echo_processes import BATCHES, MESHES, ROWS, SPECS, Rows, augment

def sharding_of(shape, neighbours, second, rows, kind):
    devices = np.array(jax.devices()).reshape(shape)
    devices = devices if neighbours else devices.T
    types = (getattr(AxisType, kind),) * 2
    mesh = Mesh(devices, ("data", second), axis_types=types)
    return NamedSharding(mesh, PartitionSpec(rows))

def own_rows(sharding):
    index = sharding.addressable_devices_indices_map((ROWS,)).values()
    return sorted({row for (each,) in index for row in range(ROWS)[each]})

def echo(upstream, spec, sharding, **options):
    return ej.device.echo_batches(
        upstream, spec, sharding=sharding, num_lanes=4, augment=augment, **options
    )

def whole(batches):
    return [multihost_utils.process_allgather(b["x"], tiled=True) for b in batches]

def same_everywhere(*meshes):
    for mesh in meshes:
        sharding = sharding_of(*MESHES[mesh])
        rows = own_rows(sharding)
        for name in SPECS if mesh == "data" else ["spread", "shuffle_buffer"]:
            upstream = Rows(rows, "slow" if name == "adaptive" else "")
            with echo(upstream, SPECS[name], sharding) as batches:
                found = list(batches)
                assert all(each["x"].sharding == sharding for each in found)
                np.savez(f"{folder}/{process} {mesh} {name}.npz", *whole(found))
                log = batches.log and batches.log.to_json()
                record = [batches.counts._asdict(), log]
                with open(f"{folder}/{process} {mesh} {name}.json", "w") as file:
                    json.dump(record, file)

def resumed():
    sharding, compared = sharding_of(*MESHES["no neighbours"]), 0
    rows = own_rows(sharding)
    for name in ["spread", "window_shuffle", "stochastic", "adaptive"]:
        with echo(Rows(rows), SPECS[name], sharding) as batches:
            states, found = [], []
            for batch in batches:
                found += whole([batch])
                states.append(batches.get_state())
            again = echo(Rows(rows), SPECS[name], sharding)
            for done, state in enumerate(states[:-1], 1):
                again.set_state(state)
                followed = whole([next(again)])
                # An adaptive echo may decide otherwise now.
                if name != "adaptive" or batches.log[done] == again.log[done]:
                    np.testing.assert_array_equal(followed[0], found[done])
                    compared += 1
            again.close()
    print("compared", compared, flush=True)

def ended(how, *names):
    sharding = sharding_of(*MESHES["data"])
    for name in names:
        rows = Rows(own_rows(sharding), how, 5 if process else BATCHES)
        with echo(rows, SPECS[name], sharding, timeout_s=2.0) as batches:
            made = 0
            try:
                for batch in batches:
                    whole([batch])
                    made += 1
            except Exception as error:
                print("after", made, type(error).__name__, error, flush=True)

class Loader:
    def __init__(self, rows):
        self.rows = rows
    def __iter__(self):
        return Rows(self.rows)

def epochs(*names):
    sharding = sharding_of(*MESHES["data"])
    for name in names:
        with echo(Loader(own_rows(sharding)), SPECS[name], sharding) as batches:
            made = [sum(x.sum() for x in whole(list(batches))) for _ in range(3)]
            assert batches.stats()["slowest_process"] in (0, 1)
            print("epochs", name, batches.counts, made, flush=True)

def other_echo():
    sharding = sharding_of(*MESHES["data"])
    spec = ej.EchoSpec(2 + process, batch_size=ROWS)
    try:
        next(echo(Rows(own_rows(sharding)), spec, sharding))
    except ValueError as error:
        print(error, flush=True)

for call in sys.argv[4].split(";"):
    eval(call)
multihost_utils.sync_global_devices("end")
"""


class Rows:
    """Host batches of some rows; it is slow, or ends, fails or hangs at one of them."""

    def __init__(self, rows, how="", at=BATCHES):
        self.rows, self.how, self.at, self.done = rows, how, at, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.done == self.at:
            if self.how == "fail":
                raise OSError("the disk is gone")
            if self.how == "hang":
                time.sleep(9)
            raise StopIteration
        if self.how == "slow":
            time.sleep(0.05)  # So that an adaptive echo repeats.
        self.done += 1
        first = (self.done - 1) * ROWS
        return {"x": np.array([[first + row] for row in self.rows], np.float32)}

    def get_state(self):
        return {"done": self.done}

    def set_state(self, state):
        self.done = state["done"]


def augment(batch, keys):
    noise = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    return {"x": jax.numpy.concatenate([batch["x"], noise], axis=1)}


def run_two(folder, calls, devices):
    """Runs the program in two processes; returns what each prints."""
    port = random.randrange(20_000, 32_768)
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(i), str(port), str(folder), calls],
            env={**os.environ, "PYTHONPATH": paths, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    found = [process.communicate(timeout=280) for process in started]
    assert [process.returncode for process in started] == [0, 0], found
    return [out for out, _ in found]


@pytest.mark.parametrize(
    ("devices", "meshes"), [(1, ["data"]), (2, MESHES)], ids=["1", "2"]
)
def test_two_processes_draw_what_one_draws(tmp_path, devices, meshes):
    run_two(tmp_path, f"same_everywhere(*{[*meshes]})", devices)
    for path in tmp_path.glob("*.json"):
        (counts, log), spec = json.loads(path.read_text()), SPECS[path.stem.split()[-1]]
        if log:
            log = ej.DecisionLog.from_json(log)
            assert len({*log}) == 2 and log[0]
            spec = dataclasses.replace(spec, replay=log)
        options = {"num_lanes": 4, "mesh": mesh_of(1), "augment": augment}
        one = ej.device.echo_batches(Rows(range(ROWS)), spec, **options)
        expected = [np.asarray(batch["x"]) for batch in one]
        found = [*np.load(path.with_suffix(".npz")).values()]
        for rows, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(rows, wanted)
        assert one.counts._asdict() == counts


def test_two_processes_go_on_from_every_batch(tmp_path):
    for out in run_two(tmp_path, "resumed()", 2):
        # 29 states of each fixed echo, 21 of the stochastic one, some adaptive ones.
        assert int(re.search(r"compared (\d+)", out)[1]) > 29 + 29 + 21


def test_two_processes_go_through_their_loaders_again(tmp_path):
    names = ["spread", "stochastic", "adaptive"]
    found = [
        re.findall(r"epochs (\w+) Counts\(fresh=(\d+), (.*)", out)
        for out in run_two(tmp_path, f"epochs(*{names})", 1)
    ]
    assert found[0] == found[1]
    fresh = str(3 * BATCHES * ROWS)
    assert [each[:2] for each in found[0]] == [(name, fresh) for name in names]


EACH = ["consecutive", "shuffle_buffer", "adaptive"]
ENDED = "loaders of processes [1] ended after 5 batches"
FAILED = "process 1 failed, so no process gets fresh batch 5: "


@pytest.mark.parametrize(
    ("how", "names", "first", "second"),
    [
        ("end", EACH, ENDED, ENDED),
        ("fail", EACH, f"{FAILED}OSError: the disk", "OSError the disk is gone"),
        ("hang", EACH[:1], f"{FAILED}TimeoutError", "TimeoutError the loader gave no"),
    ],
)
def test_a_loader_that_stops_early_is_an_error_in_all(
    tmp_path, how, names, first, second
):
    said = run_two(tmp_path, f"ended('{how}', *{names})", 1)
    found = [re.findall(r"after (\d+) (.*)", out) for out in said]
    assert [made for made, _ in found[0]] == [made for made, _ in found[1]]
    for lines, words in zip(found, (first, second), strict=True):
        assert len(lines) == len(names)
        assert all(words in line for _, line in lines), lines


def test_processes_that_make_other_echoes_are_refused(tmp_path):
    for out in run_two(tmp_path, "other_echo()", 1):
        assert "must make the same echo" in out and "factor=3" in out
