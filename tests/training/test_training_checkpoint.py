import shutil

import jax
import numpy as np
import pytest
from tiny_workload import make_workload, tiny_config

from echo_jax.echo.spec import EchoSpec
from echo_jax.training.checkpoint import Checkpoints
from echo_jax.training.setup import make_setup
from echo_jax.training.state import params_sha256

BIG = 2**63 - 1


def setup_of(**overrides):
    config = tiny_config(**overrides)
    return make_setup(config, make_workload(config))


@pytest.fixture
def checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "deep" / "checkpoints", keep=2)
    yield checkpoints
    checkpoints.close()


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))
    return jax.tree.structure(a) == jax.tree.structure(b)


@pytest.mark.parametrize(("data", "fsdp"), [(1, 1), (2, 4)])
def test_state_and_host_come_back_on_any_mesh(checkpoints, data, fsdp):
    setup = setup_of(mesh__data=4, mesh__fsdp=2)
    state = setup.program.init(setup.init_key)
    host = {"data": {"next": BIG, "of": [2**70, -1]}, "clock": {"wait_s": 0.1 + 0.2}}
    checkpoints.save(3, state, host)
    # What Orbax writes in the background is the past, not what becomes of it.
    host["data"]["next"] = 0

    other = setup_of(mesh__data=data, mesh__fsdp=fsdp).program
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
            other.shardings,
        )
    )


def test_a_save_holds_the_state_as_it_was_though_it_is_donated(checkpoints):
    setup = setup_of()
    state = setup.program.init(setup.init_key)
    before = params_sha256(state.params)
    checkpoints.save(1, state, {})
    batch = next(
        iter(make_workload(tiny_config()).train_dataset(EchoSpec(batch_size=8)))
    )
    for _ in range(20):
        state, _ = setup.step(state, batch)
    restored, _ = checkpoints.restore(1, setup.program.abstract_state)
    assert params_sha256(restored.params) == before != params_sha256(state.params)


def test_keeps_the_newest(checkpoints):
    setup = setup_of()
    state = setup.program.init(setup.init_key)
    assert checkpoints.latest() is None
    for update in (1, 2, 5):
        checkpoints.save(update, state, {"update": update})
    assert checkpoints.latest() == 5
    checkpoints.save(5, state, {"update": "again"})
    assert checkpoints.restore(5, setup.program.abstract_state)[1] == {"update": 5}
    assert checkpoints.restore(2, setup.program.abstract_state)[1] == {"update": 2}
    with pytest.raises(FileNotFoundError):
        checkpoints.restore(1, setup.program.abstract_state)


def test_refuses_what_is_no_plain_data(checkpoints):
    setup = setup_of()
    state = setup.program.init(setup.init_key)
    with pytest.raises(TypeError, match=r"int64 is not JSON"):
        checkpoints.save(1, state, {"data": np.int64(3)})
    assert checkpoints.latest() is None


def test_half_a_checkpoint_is_none(tmp_path):
    setup = setup_of()
    state = setup.program.init(setup.init_key)
    checkpoints = Checkpoints(tmp_path, keep=5)
    checkpoints.save(1, state, {"update": 1})
    checkpoints.save(2, state, {"update": 2})
    checkpoints.close()
    # What a kill leaves behind: the folder as it is named until all of it is there.
    shutil.rmtree(tmp_path / "2" / "state" / "d")
    (tmp_path / "2").rename(tmp_path / "2.orbax-checkpoint-tmp")

    again = Checkpoints(tmp_path, keep=5)
    assert again.latest() == 1
    again.save(2, state, {"update": "again"})
    assert again.restore(2, setup.program.abstract_state)[1] == {"update": "again"}
    again.close()
