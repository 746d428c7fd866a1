"""Damaged checkpoints: seen, passed over, and said, whatever a disk does to them."""

import json
import random
import shutil
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_workload import make_workload, run, tiny_config

from benchmarks.faults.damage import damage
from echo_jax.files.folders import run_folder
from echo_jax.files.json_files import read_json
from echo_jax.training.saving import checkpoint_reader
from echo_jax.training.saving.checkpoint import Checkpoints, params_sha256
from echo_jax.training.saving.checkpoint_reader import DamagedCheckpointError
from echo_jax.training.saving.checksum import checksums
from echo_jax.training.trainer import compile_functions


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int8", "uint16", "int32", "bool", "complex64"]
)
def test_every_flipped_bit_changes_a_checksum(dtype):
    """Of every element, since each is mixed in a way of its own."""
    value = np.arange(6).reshape(2, 3).astype(jnp.dtype(dtype))
    before = checksums([jnp.asarray(value)])
    data = bytearray(value.tobytes())
    for at in range(len(data)):
        for bit in range(1 if dtype == "bool" else 8):
            damaged = data.copy()
            damaged[at] ^= 1 << bit
            other = np.frombuffer(bytes(damaged), value.dtype).reshape(value.shape)
            assert checksums([jnp.asarray(other)]) != before


def test_a_checksum_sees_what_lies_where():
    value = jnp.arange(6.0).reshape(2, 3)
    found = {
        checksums([other])["[0]"]
        for other in (value, value[::-1], value[:, ::-1], value + 0.5, -value)
    }
    assert len(found) == 5
    # Zeros of either sign are different bits, and keys are bits, too.
    assert checksums([jnp.float32(0.0)]) != checksums([jnp.float32(-0.0)])
    assert checksums([jax.random.key(0)]) != checksums([jax.random.key(1)])
    assert checksums({"a": value}) == checksums({"a": np.asarray(value)})


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data")])
def test_a_checksum_is_the_same_in_every_version_and_on_every_mesh(spec):
    """Another one would make all checkpoints damaged that are there already."""
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    value = jnp.arange(48.0).reshape(8, 6)
    state = {"a": jax.device_put(value, NamedSharding(mesh, spec))}
    state |= {"b": jnp.arange(16, dtype=jnp.bfloat16), "c": jax.random.key(0)}
    assert checksums(state) == {
        "['a']": "c1cf2abaa2832173",
        "['b']": "1fae525c1c83b23b",
        "['c']": "11fd02ebb1f728f8",
    }


def mixed(word):
    word = (word ^ (word >> 16)) * 0x85EBCA6B % 2**32
    word = (word ^ (word >> 13)) * 0xC2B2AE35 % 2**32
    return word ^ (word >> 16)


def test_a_checksum_is_that_computed_by_hand():
    first = second = 0
    words = np.random.default_rng(0).integers(0, 2**32, 50, np.uint32)
    for place, word in enumerate(words.tolist()):
        one = mixed(word ^ (place * 0x9E3779B1 % 2**32))
        other = (one + place * 0x85EBCA77) % 2**32
        other = (other ^ (other >> 15)) * 0xC2B2AE35 % 2**32
        first, second = first + one, second + (other ^ (other >> 16))
    by_hand = f"{first % 2**32:08x}{second % 2**32:08x}"
    assert checksums({"a": words.reshape(5, 10)}) == {"['a']": by_hand}


def functions():
    config = tiny_config()
    return compile_functions(config, make_workload(config))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints of updates 1 and 2, and their states."""
    folder = tmp_path_factory.mktemp("damage") / "checkpoints"
    compiled = functions()
    states = {1: compiled.init(compiled.init_key)}
    states[2] = jax.tree.map(lambda x: x + x.dtype.type(1), states[1])
    checkpoints = Checkpoints(run_folder(folder), keep=2)
    for update, state in states.items():
        checkpoints.save(update, state, {"update": update})
    checkpoints.close()
    return folder, states, compiled.abstract_state


def check_damage(saved, folder, seed):
    """Damages the newest checkpoint somewhere; whether it was passed over."""
    _, states, abstract_state = saved
    rng = random.Random(seed)
    shutil.copytree(saved[0], folder)
    files = sorted(path for path in (folder / "2").rglob("*") if path.is_file())
    file = rng.choice(files)
    what = damage(file, rng)
    checkpoints = Checkpoints(run_folder(folder), keep=2)
    found = checkpoints.restore_newest(abstract_state)
    assert found is not None
    where = f"seed {seed}: {file.relative_to(folder)}, {what}"
    # The one before is whole; the damaged one may be read where nothing depends on it.
    assert found.update == (1 if found.damaged else 2), where
    wanted = params_sha256(states[found.update])
    assert params_sha256(found.state) == wanted, where
    assert found.host == {"update": found.update}, where
    if found.damaged:
        assert [*found.damaged] == [2] and "update 2 in" in found.damaged[2]
        # Its update can be saved again, and nothing is taken for it.
        checkpoints.save(2, states[2], {"update": 2})
    checkpoints.close()
    again = Checkpoints(run_folder(folder), keep=2)
    found_again = again.restore_newest(abstract_state)
    assert found_again and (found_again.update, found_again.damaged) == (2, {}), where
    again.close()
    return bool(found.damaged)


def test_a_checkpoint_with_other_checksums_is_said_to_be_of_an_earlier_version(
    saved, tmp_path
):
    _, states, abstract_state = saved
    with ocp.CheckpointManager(tmp_path) as manager:
        state, host = ocp.args.StandardSave(states[1]), ocp.args.JsonSave({"host": {}})
        manager.save(1, args=ocp.args.Composite(state=state, host=host))
    checkpoints = Checkpoints(run_folder(tmp_path), keep=1)
    with pytest.raises(DamagedCheckpointError, match=r"1 in .* an earlier version"):
        checkpoints.restore_newest(abstract_state)
    checkpoints.close()


def test_what_a_disk_does_to_a_checkpoint_is_seen(saved, tmp_path):
    seen = [check_damage(saved, tmp_path / str(seed), seed) for seed in range(12)]
    assert any(seen)


@pytest.mark.slow
def test_whatever_a_disk_does_to_a_checkpoint_is_seen(saved, tmp_path):
    seen = [check_damage(saved, tmp_path / str(seed), seed) for seed in range(200)]
    assert sum(seen) > 100


def test_every_file_has_its_size_in_the_sums_and_a_small_one_all_its_bytes(
    saved, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoint_reader, "_SUMMED_BYTES", 512)
    checkpoints = Checkpoints(run_folder(tmp_path), keep=1)
    checkpoints.save(1, saved[1][1], {})
    checkpoints.close()
    sums = json.loads((tmp_path / "1.sums.json").read_text())["files"]
    files = [path for path in (tmp_path / "1").rglob("*") if path.is_file()]
    contents = {str(f.relative_to(tmp_path / "1")): f.read_bytes() for f in files}
    assert min(map(len, contents.values())) < 512 < max(map(len, contents.values()))
    for name, content in contents.items():
        crc = [f"{zlib.crc32(content):08x}"] if len(content) <= 512 else []
        assert sums.pop(name).split(":") == [str(len(content)), *crc]
    assert not sums


def compressible(folder):
    """Saves 40 arrays that are stored in fewer bytes than they have; their shapes.

    A flip in them is no other number but the end of a read, beside many others.
    """
    numbers = np.random.default_rng(0).integers(0, 255, (40, 60_000))
    state = {str(k): jnp.float32(row) for k, row in enumerate(numbers)}
    checkpoints = Checkpoints(run_folder(folder), keep=2)
    checkpoints.save(1, state, {})
    checkpoints.close()
    return jax.eval_shape(lambda: state)


def test_a_read_that_fails_says_one_sentence_whatever_its_threads_run_into(
    tmp_path, capfd
):
    abstract_state = compressible(tmp_path)
    data = max((tmp_path / "1").rglob("d/*"), key=lambda path: path.stat().st_size)
    whole = data.read_bytes()
    rng = random.Random(0)
    for _ in range(4):
        flipped = bytearray(whole)
        flipped[rng.randrange(len(whole) // 2)] ^= 1
        data.write_bytes(flipped)
        checkpoints = Checkpoints(run_folder(tmp_path), keep=2)
        with pytest.raises(DamagedCheckpointError, match=r"is damaged|OCDBT database"):
            checkpoints.restore(1, abstract_state)
        checkpoints.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("fails", [False, True])
def test_what_threads_fail_with_is_lost_where_a_read_fails_alone(
    saved, tmp_path, monkeypatch, fails
):
    """It may be of an iterator of the user's own that is collected meanwhile."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda each: told.append(each.exc_value))
    folder = shutil.copytree(saved[0], tmp_path / "c")
    checkpoints = Checkpoints(run_folder(folder), keep=2)
    real = checkpoints._manager.restore

    class Fails:
        def __del__(self):
            raise ValueError("in vain")

    def restore(*args, **kwargs):
        Fails()
        if fails:
            raise OSError("unreadable")
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoints._manager, "restore", restore)
    if fails:
        with pytest.raises(DamagedCheckpointError, match=r"OSError: unreadable"):
            checkpoints.restore(2, saved[2])
    else:
        checkpoints.restore(2, saved[2])
    checkpoints.close()
    assert [str(each) for each in told] == ([] if fails else ["in vain"])


def test_where_no_checkpoint_is_whole_nothing_is_begun(saved, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved[0], folder)
    for update in (1, 2):
        shutil.rmtree(folder / str(update) / "state")
    checkpoints = Checkpoints(run_folder(folder), keep=2)
    with pytest.raises(
        DamagedCheckpointError, match=r"no checkpoint can be gone on from: .*2.*1"
    ):
        checkpoints.restore_newest(saved[2])
    checkpoints.close()
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"1", "2"}


def test_a_run_goes_on_from_the_checkpoint_before_to_the_same_end(tmp_path):
    options = {"updates": 12, "checkpoint_every": 4, "echo__factor": 2.0}
    whole = run(tmp_path / "whole", **options)
    run(tmp_path / "broken", **{**options, "updates": 8})
    newest = tmp_path / "broken" / "checkpoints" / "8"
    data = max(newest.rglob("d/*"), key=lambda path: path.stat().st_size)
    flipped = bytearray(data.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    data.write_bytes(flipped)
    summary = run(tmp_path / "broken", **options)
    assert summary["params_sha256"] == whole["params_sha256"]
    assert (tmp_path / "broken" / "checkpoints" / "8.damaged-0").is_dir()
    rows = (tmp_path / "broken" / "metrics.jsonl").read_text()
    assert '"kind": "restored", "updates": 4, "damaged": [8]' in rows
    assert (whole["restored"], whole["rows_lost"]) == ([], 0)
    assert (summary["restored"], summary["rows_lost"]) == ([8], 0)
    assert read_json(run_folder(tmp_path / "broken") / "config.json")["updates"] == 12


def test_a_summary_counts_the_rows_that_damage_took(tmp_path):
    """Also those of a sitting before the last."""
    options = {"checkpoint_every": 4, "log_every": 2}
    for updates, lost in ((8, 0), (12, 1), (16, 1)):
        summary = run(tmp_path, updates=updates, **options)
        assert summary["rows_lost"] == lost
        if updates == 8:
            file = tmp_path / "metrics.jsonl"
            first, _, *others = file.read_bytes().splitlines(keepends=True)
            file.write_bytes(b"".join([first, b"{damaged\n", *others]))
