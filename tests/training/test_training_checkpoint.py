import shutil

import jax
import numpy as np
import pytest
from tiny_workload import make_workload, tiny_config

from echo_jax.echo.spec import EchoSpec
from echo_jax.files.folders import run_folder
from echo_jax.training.saving.checkpoint import Checkpoints, params_sha256
from echo_jax.training.saving.checkpoint_reader import DamagedCheckpointError
from echo_jax.training.trainer import compile_functions

BIG = 2**63 - 1


def functions_of(**overrides):
    config = tiny_config(**overrides)
    return compile_functions(config, make_workload(config))


@pytest.fixture
def checkpoints(tmp_path):
    checkpoints = Checkpoints(run_folder(tmp_path / "deep" / "checkpoints"), keep=2)
    yield checkpoints
    checkpoints.close()


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))
    return jax.tree.structure(a) == jax.tree.structure(b)


@pytest.mark.parametrize(("data", "fsdp"), [(1, 1), (2, 4)])
def test_state_and_host_come_back_on_any_mesh(checkpoints, data, fsdp):
    compiled = functions_of(mesh__data=4, mesh__fsdp=2)
    state = compiled.init(compiled.init_key)
    host = {"data": {"next": BIG, "of": [2**70, -1]}, "clock": {"wait_s": 0.1 + 0.2}}
    checkpoints.save(3, state, host)
    # What Orbax writes in the background is the past, not what becomes of it.
    host["data"]["next"] = 0

    other = functions_of(mesh__data=data, mesh__fsdp=fsdp)
    restored, restored_host = checkpoints.restore(3, other.abstract_state)
    assert equal(restored, state)
    assert restored_host["data"] == {"next": BIG, "of": [2**70, -1]}
    assert restored_host["clock"]["wait_s"] == 0.1 + 0.2
    shardings = jax.tree.map(lambda x: x.sharding, restored)
    assert jax.tree.all(
        jax.tree.map(
            lambda x, s, wanted: s.is_equivalent_to(wanted, x.ndim),
            restored,
            shardings,
            jax.tree.map(lambda x: x.sharding, other.abstract_state),
        )
    )


def test_a_save_holds_the_state_as_it_was_though_it_is_donated(checkpoints):
    compiled = functions_of()
    state = compiled.init(compiled.init_key)
    before = params_sha256(state.params)
    checkpoints.save(1, state, {})
    batch = next(
        iter(make_workload(tiny_config()).train_dataset(EchoSpec(batch_size=8)))
    )
    for _ in range(20):
        state, _ = compiled.step_on_batch(state, batch)
    restored, _ = checkpoints.restore(1, compiled.abstract_state)
    assert params_sha256(restored.params) == before != params_sha256(state.params)


def test_keeps_the_newest(tmp_path):
    checkpoints = Checkpoints(run_folder(tmp_path), keep=2)
    compiled = functions_of()
    state = compiled.init(compiled.init_key)
    assert checkpoints.latest() is None
    for update in (1, 2, 5):
        checkpoints.save(update, state, {"update": update})
    assert checkpoints.latest() == 5
    checkpoints.save(5, state, {"update": "again"})
    checkpoints.close()  # Old ones are removed in the background.
    again = Checkpoints(run_folder(tmp_path), keep=2)
    assert again.restore(5, compiled.abstract_state)[1] == {"update": 5}
    assert again.restore(2, compiled.abstract_state)[1] == {"update": 2}
    with pytest.raises(DamagedCheckpointError, match=r"update 1 in .* cannot be read"):
        again.restore(1, compiled.abstract_state)
    again.close()


def test_refuses_what_is_no_plain_data(checkpoints):
    compiled = functions_of()
    state = compiled.init(compiled.init_key)
    with pytest.raises(TypeError, match=r"int64 is not JSON"):
        checkpoints.save(1, state, {"data": np.int64(3)})
    assert checkpoints.latest() is None


def test_half_a_checkpoint_is_none(tmp_path):
    compiled = functions_of()
    state = compiled.init(compiled.init_key)
    checkpoints = Checkpoints(run_folder(tmp_path), keep=5)
    checkpoints.save(1, state, {"update": 1})
    checkpoints.save(2, state, {"update": 2})
    checkpoints.close()
    # What a kill leaves behind: the folder as it is named until all of it is there.
    shutil.rmtree(tmp_path / "2" / "state" / "d")
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")

    again = Checkpoints(run_folder(tmp_path), keep=5)
    assert again.latest() == 1
    again.save(2, state, {"update": "again"})
    assert again.restore(2, compiled.abstract_state)[1] == {"update": "again"}
    again.close()
