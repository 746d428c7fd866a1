"""Checkpoints: what is saved comes back, and damage is seen, passed over, and said."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_workload import functions_of, rows_of, run

from echo_jax.files import read_json, run_folder
from echo_jax.training.saving import Checkpoints, DamagedCheckpointError, checksums

BIG = 2**63 - 1


def opened(folder):
    return Checkpoints(run_folder(folder), keep=2)


def flip_a_bit_of_each_file(checkpoint):
    # Not of one file: some are copies that nobody reads.
    for data in checkpoint.rglob("d/*"):
        flipped = bytearray(data.read_bytes())
        flipped[len(flipped) // 2] ^= 1
        data.write_bytes(flipped)


@pytest.mark.parametrize(("data", "fsdp"), [(1, 1), (2, 4)])
def test_state_and_host_come_back_on_any_mesh(tmp_path, data, fsdp):
    checkpoints = opened(tmp_path / "deep" / "checkpoints")
    compiled = functions_of(mesh__data=4, mesh__fsdp=2)
    state = compiled.init(compiled.init_key)
    host = {"data": {"next": BIG, "of": [2**70, -1]}, "clock": {"wait_s": 0.1 + 0.2}}
    checkpoints.save(3, state, host)
    # What Orbax writes in the background is the past, not what becomes of it.
    host["data"]["next"] = 0

    wanted = functions_of(mesh__data=data, mesh__fsdp=fsdp).abstract_state
    restored, restored_host = checkpoints.restore(3, wanted)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((restored, state)))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert restored_host["data"] == {"next": BIG, "of": [2**70, -1]}
    assert restored_host["clock"]["wait_s"] == 0.1 + 0.2
    for found, shape in zip(*map(jax.tree.leaves, (restored, wanted)), strict=True):
        assert found.sharding.is_equivalent_to(shape.sharding, found.ndim)
    checkpoints.close()


def test_keeps_the_newest_and_counts_no_half_one(tmp_path):
    checkpoints = opened(tmp_path)
    compiled = functions_of()
    state = compiled.init(compiled.init_key)
    assert checkpoints.latest() is None
    with pytest.raises(TypeError, match=r"int64 is not JSON"):
        checkpoints.save(1, state, {"data": np.int64(3)})
    assert checkpoints.latest() is None
    for update in (1, 2, 5):
        checkpoints.save(update, state, {"update": update})
    assert checkpoints.latest() == 5
    checkpoints.save(5, state, {"update": "again"})
    checkpoints.close()  # Old ones are removed in the background.
    again = opened(tmp_path)
    assert again.restore(5, compiled.abstract_state)[1] == {"update": 5}
    assert again.restore(2, compiled.abstract_state)[1] == {"update": 2}
    with pytest.raises(DamagedCheckpointError, match=r"update 1 in .* cannot be read"):
        again.restore(1, compiled.abstract_state)
    again.close()

    # What a kill leaves behind: the folder as it is named until all of it is there.
    shutil.rmtree(tmp_path / "5" / "state" / "d")
    (tmp_path / "5").rename(tmp_path / "5.orbax-checkpoint-tmp")
    after = opened(tmp_path)
    assert after.latest() == 2
    after.save(5, state, {"update": "again"})
    assert after.restore(5, compiled.abstract_state)[1] == {"update": "again"}
    after.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "complex64"])
def test_every_flipped_bit_changes_a_checksum(dtype):
    value = np.arange(4).reshape(2, 2).astype(jnp.dtype(dtype))
    before = checksums([jnp.asarray(value)])
    data = value.tobytes()
    for at in range(len(data)):
        for bit in range(1 if dtype == "bool" else 8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            other = np.frombuffer(bytes(damaged), value.dtype).reshape(value.shape)
            assert checksums([jnp.asarray(other)]) != before


def test_a_checksum_is_the_same_in_every_version_and_on_every_mesh():
    """Another one would make all checkpoints damaged that are there already."""
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    value = jnp.arange(48.0).reshape(8, 6)
    state = {"a": jax.device_put(value, NamedSharding(mesh, P(None, "data")))}
    state |= {"b": jnp.arange(16, dtype=jnp.bfloat16), "c": jax.random.key(0)}
    assert checksums(state) == {
        "['a']": "c1cf2abaa2832173",
        "['b']": "1fae525c1c83b23b",
        "['c']": "11fd02ebb1f728f8",
    }


def test_a_flip_in_a_large_file_is_said_in_a_sentence(tmp_path, capfd):
    # Stored in fewer bytes than they have: a flip in them is no other number but the
    # end of a read, beside many others.
    numbers = np.random.default_rng(0).integers(0, 255, (16, 90_000))
    state = {str(k): jnp.float32(row) for k, row in enumerate(numbers)}
    checkpoints = opened(tmp_path)
    checkpoints.save(1, state, {})
    checkpoints.close()
    flip_a_bit_of_each_file(tmp_path / "1")
    checkpoints = opened(tmp_path)
    with pytest.raises(DamagedCheckpointError, match=r"is damaged|OCDBT database"):
        checkpoints.restore(1, jax.eval_shape(lambda: state))
    checkpoints.close()
    assert capfd.readouterr().err == ""


def test_where_no_checkpoint_is_whole_nothing_is_begun(tmp_path):
    run(tmp_path, updates=2, checkpoint_every=1)
    folder = tmp_path / "checkpoints"
    for update in (1, 2):
        shutil.rmtree(folder / str(update) / "state")
    with pytest.raises(DamagedCheckpointError, match=r"no checkpoint can be.*2.*1"):
        run(tmp_path, updates=3, checkpoint_every=1)
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"1", "2"}


def test_a_run_goes_on_from_the_checkpoint_before_to_the_same_end(tmp_path):
    options = {"updates": 12, "checkpoint_every": 4, "echo__factor": 2.0}
    whole = run(tmp_path / "whole", **options)
    run(tmp_path / "broken", **{**options, "updates": 8})
    checkpoints = tmp_path / "broken" / "checkpoints"
    flip_a_bit_of_each_file(checkpoints / "8")
    summary = run(tmp_path / "broken", **options)
    assert summary["params_sha256"] == whole["params_sha256"]
    assert (checkpoints / "8.damaged-0").is_dir()
    (row,) = rows_of(tmp_path / "broken", "restored")
    assert (row["updates"], row["damaged"]) == (4, [8])
    assert (whole["restored"], whole["rows_lost"]) == ([], 0)
    assert (summary["restored"], summary["rows_lost"]) == ([8], 0)
    assert read_json(run_folder(tmp_path / "broken") / "config.json")["updates"] == 12


def test_a_summary_counts_the_rows_that_damage_took_in_any_sitting(tmp_path):
    for updates, lost in ((8, 0), (12, 1), (16, 1)):
        summary = run(tmp_path, updates=updates, checkpoint_every=4, log_every=2)
        assert summary["rows_lost"] == lost
        if updates == 8:
            file = tmp_path / "metrics.jsonl"
            first, _, *others = file.read_bytes().splitlines(keepends=True)
            file.write_bytes(b"".join([first, b"{damaged\n", *others]))
