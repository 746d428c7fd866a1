import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from trained_runs import untrained_detector

import echo_jax as ej
from echo_jax.files.folders import FolderError, run_folder
from echo_jax.inference.export import export_run
from echo_jax.training.saving.weights import flat_arrays, read_weights, write_weights


def test_weights_are_read_back_to_the_bit_with_what_they_mean(shapes_run, tmp_path):
    run = ej.load_run(shapes_run[0])
    file = export_run(run, "safetensors", tmp_path / "m.safetensors")
    found, wanted = read_weights(str(file)), flat_arrays(run.variables)
    assert found.keys() == wanted.keys()
    assert {name.split("/")[0] for name in found} == {"params", "batch_stats"}
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    with safe_open(str(file), framework="np") as opened:
        metadata = {k: json.loads(v) for k, v in opened.metadata().items()}
    assert metadata["task"]["classes"] == run.classes
    assert metadata["config"]["model"] == run.config.model.to_dict()
    assert metadata["update"] == 2


def test_arrays_of_any_layout_and_type_are_read_back(tmp_path):
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {
        "turned": rows.T,
        "every_other": rows[:, ::2],
        "half": jnp.ones((2, 3), jnp.bfloat16) / 3,
        "one": np.float32(7.0).reshape(()),
        "none": np.zeros((0, 3), np.int8),
    }
    write_weights(tmp_path / "a.safetensors", {"params": arrays}, {})
    found = read_weights(tmp_path / "a.safetensors")
    for name, array in arrays.items():
        got = found[f"params/{name}"]
        assert got.dtype == array.dtype and got.shape == array.shape
        np.testing.assert_array_equal(got, np.asarray(array))


def program_of(file):
    return jax.export.deserialize(bytearray(run_folder(file).read_bytes()))


@pytest.mark.slow
def test_a_program_predicts_alike_for_batches_of_any_size(lm_run, shapes_run, tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (5, 32, 32, 3), np.uint8)
    tokens = rng.integers(0, 255, (5, 16), np.int32)
    for folder, batch in (
        (lm_run[0], {"tokens": tokens}),
        (shapes_run[0], {"image": images}),
    ):
        run = ej.load_run(folder)
        program = program_of(export_run(run, "stablehlo", tmp_path / "m.stablehlo"))
        assert program.platforms == ("cpu", "cuda", "tpu")
        for size in (1, 5):
            part = {name: array[:size] for name, array in batch.items()}
            found, wanted = program.call(part), run.predict(part)
            assert found.keys() == wanted.keys()
            for name, array in wanted.items():
                np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
def test_a_detector_is_exported_with_its_suppression_of_overlaps(tmp_path):
    run = untrained_detector(tmp_path)
    program = program_of(export_run(run, "stablehlo"))
    images = np.random.default_rng(0).integers(0, 255, (3, 64, 64, 3), np.uint8)
    found, wanted = program.call({"image": images}), run.predict({"image": images})
    assert found["boxes"].shape == wanted["boxes"].shape
    np.testing.assert_allclose(found["scores"], wanted["scores"], rtol=1e-4, atol=1e-6)


def test_what_is_no_file_of_weights_is_refused(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"nothing of the kind, and long enough")
    with pytest.raises(FolderError, match="is no file of safetensors"):
        read_weights(tmp_path / "x.safetensors")
    with pytest.raises(FolderError, match="there is no file"):
        read_weights(tmp_path / "y.safetensors")


def test_whatever_bit_of_an_array_has_changed_is_seen(tmp_path):
    file = tmp_path / "a.safetensors"
    arrays = {"a": np.arange(6, dtype=np.float32), "b": jnp.ones(4, jnp.bfloat16)}
    write_weights(file, {"params": arrays}, {"update": 3})
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    assert len(whole) - start == 6 * 4 + 4 * 2
    for bit in range(8 * start, 8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises(FolderError, match=r"is damaged: .params/[ab]. is not what"):
            read_weights(file)
    for before, after, said in (
        (b"params/a", b"params/c", "its hashes are not those of its arrays"),
        (b'{\\"params', b'[\\"params', "its hashes cannot be read"),
    ):
        file.write_bytes(whole.replace(before, after, 1))
        with pytest.raises(FolderError, match=f"is damaged: {said}"):
            read_weights(file)


def test_weights_of_other_programs_and_links_are_read(tmp_path):
    from safetensors.numpy import save_file

    save_file({"params/a": np.ones(3)}, tmp_path / "a.safetensors")
    (tmp_path / "link.safetensors").symlink_to("a.safetensors")
    (found,) = read_weights(tmp_path / "link.safetensors").values()
    np.testing.assert_array_equal(found, np.ones(3))


def test_nobody_waits_for_weights_in_a_named_pipe(tmp_path):
    os.mkfifo(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").symlink_to("a.safetensors")
    for name in ("a", "b"):
        with pytest.raises(FolderError, match="is a named pipe where a file belongs"):
            read_weights(tmp_path / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("package", "to"), [("safetensors", "safetensors"), ("flatbuffers", "stablehlo")]
)
def test_a_missing_package_is_named_with_its_extra(
    package, to, lm_run, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'echo-jax\[export\]'"):
        export_run(ej.load_run(lm_run[0]), to, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    with pytest.raises(ValueError, match="to='onnx' is unknown; use one of"):
        export_run(ej.load_run(lm_run[0]), "onnx")
