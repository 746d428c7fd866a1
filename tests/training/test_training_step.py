import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tiny_workload import Regression, example, make_workload, tiny_config

from echo_jax.training import compiled
from echo_jax.training.evaluation import evaluate
from echo_jax.training.feeds.feed import HostBatching, HostInput
from echo_jax.training.processes.sharding import make_mesh, param_shardings
from echo_jax.training.saving.checkpoint import params_sha256
from echo_jax.training.trainer import compile_functions
from echo_jax.training.window import LossWindow


def functions_of(**overrides):
    config = tiny_config(**overrides)
    return compile_functions(config, make_workload(config))


def batch_of(first=0, *, repeat=0, size=8):
    items = [example(first + i) for i in range(size)]
    return {
        "x": np.stack([item["x"] for item in items]),
        "y": np.stack([item["y"] for item in items]),
        "fresh_index": np.arange(size),
        "repeat": np.broadcast_to(np.int32(repeat), (size,)),
    }


def test_the_window_sums_and_counts_by_repeat():
    window = LossWindow.empty()
    window = window.add(jnp.array([1.0, 2.0, 4.0, 8.0]), jnp.array([0, 1, 0, 6]))
    window = window.add(jnp.array([16.0, 32.0, 64.0]), jnp.array([7, 8, 1000]))
    np.testing.assert_array_equal(window.loss, [5, 2, 0, 0, 0, 0, 8, 112])
    np.testing.assert_array_equal(window.count, [2, 1, 0, 0, 0, 0, 1, 3])
    assert window.count.dtype == jnp.int32


def test_a_loss_that_is_not_finite_stays_in_its_bucket():
    window = LossWindow.empty().add(jnp.array([jnp.inf, 1.0]), jnp.array([1, 0]))
    np.testing.assert_array_equal(window.loss[:3], [1, jnp.inf, 0])


def test_the_window_starts_anew_after_every_log():
    compiled = functions_of(log_every=3)
    state = compiled.init(compiled.init_key)
    counts = []
    for i in range(7):
        state, report = compiled.step_on_batch(state, batch_of(8 * i, repeat=i % 2))
        counts.append(np.asarray(report.window.count)[:2].tolist())
    assert counts == [[8, 0], [8, 8], [16, 8], [0, 8], [8, 8], [8, 16], [8, 0]]


def test_the_first_bad_update_is_remembered():
    compiled = functions_of()
    state = compiled.init(compiled.init_key)
    seen = []
    for i in range(4):
        batch = batch_of(8 * i)
        if i == 1:
            batch["y"][3] = np.nan
        state, report = compiled.step_on_batch(state, batch)
        seen.append(int(report.first_bad_update))
    assert seen == [0, 2, 2, 2]
    assert not compiled.is_finite(state)


def test_a_state_with_one_infinite_number_is_not_finite():
    compiled = functions_of()
    state = compiled.init(compiled.init_key)
    assert compiled.is_finite(state)
    bad = {**state.params, "bias": state.params["bias"].at[3].set(jnp.inf)}
    assert not compiled.is_finite(state.replace(params=bad))


def test_donates_the_state_and_never_the_batch():
    compiled = functions_of()
    state = compiled.init(compiled.init_key)
    batching = HostBatching(compiled.mesh)
    inputs = jax.device_put(HostInput.of([batch_of()]), batching.input_sharding)
    step = compiled.program(batching)
    new_state, report = step(state, (), inputs, compiled.run)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves((inputs, new_state)))
    # The next step takes the state's memory away, not the report's.
    step(new_state, (), inputs, compiled.run)
    assert not any(x.is_deleted() for x in jax.tree.leaves(report))


def test_randomness_is_a_function_of_seed_and_update():
    def after_two(seed, start):
        compiled = functions_of(seed=seed, optim__lr=0.1)
        state = compiled.init(jax.random.key(0))
        state = state.replace(update=state.update + start)
        state, _ = compiled.step_on_batch(state, batch_of())
        return params_sha256(state.params)

    assert after_two(0, 0) == after_two(0, 0)
    assert len({after_two(0, 0), after_two(1, 0), after_two(0, 1)}) == 3


@functools.cache
def losses(data, fsdp):
    compiled = functions_of(mesh__data=data, mesh__fsdp=fsdp)
    state = compiled.init(compiled.init_key)
    seen = []
    for i in range(8):
        state, report = compiled.step_on_batch(state, batch_of(8 * i))
        jax.block_until_ready(report)
        seen.append(float(report.window.loss.sum()))
    return seen, state


@pytest.mark.parametrize(("data", "fsdp"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_equal_loss_on_any_mesh(data, fsdp):
    seen, state = losses(data, fsdp)
    np.testing.assert_allclose(seen, losses(1, 1)[0], rtol=1e-5)
    first = state.params["first"]
    assert first.sharding.num_devices == 8
    assert first.addressable_shards[0].data.shape == (4, 16 // fsdp)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == first.shape]
    assert len(moments) == 2
    assert all(x.sharding == first.sharding for x in moments)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((12, 16), PartitionSpec(None, "fsdp")),
        ((16, 16), PartitionSpec("fsdp")),
        ((18, 8), PartitionSpec(None, "fsdp")),
        ((3, 5), PartitionSpec()),
        ((), PartitionSpec()),
    ],
)
def test_the_largest_divisible_axis_is_split(shape, spec):
    mesh = make_mesh(2, 4, 8)
    array = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert param_shardings({"a": array}, mesh)["a"].spec == spec


def test_a_mesh_that_does_not_fit_is_refused():
    assert dict(make_mesh(-1, 2, 8).shape) == {"data": 4, "fsdp": 2}
    with pytest.raises(ValueError, match=r"data=3 times .*fsdp=4 does not fit 8 dev"):
        make_mesh(3, 4, 12)
    with pytest.raises(ValueError, match=r"fsdp=16 does not fit 8 devices"):
        make_mesh(-1, 16, 16)
    with pytest.raises(ValueError, match=r"batch_size=12 is not a multiple of the 8"):
        make_mesh(-1, 1, 12)


def test_the_hash_sees_every_bit_and_no_mesh():
    params = {"a": jnp.arange(8.0), "b": jnp.ones((2, 2))}
    same = params_sha256(params)
    mesh = make_mesh(2, 4, 8)
    assert params_sha256(jax.device_put(params, param_shardings(params, mesh))) == same
    nudged = np.asarray(params["a"]).copy()
    nudged[5] = np.nextafter(nudged[5], np.float32(9))
    assert params_sha256({**params, "a": nudged}) != same
    assert params_sha256({"a": params["b"], "b": params["a"]}) != same
    assert params_sha256({**params, "b": params["b"].reshape(4)}) != same


def eval_split(config):
    return list(make_workload(config).eval_batches())


@pytest.mark.parametrize("data", [1, 8])
def test_evaluation_is_the_mean_over_the_examples_not_over_the_batches(data):
    config = tiny_config(mesh__data=data)
    compiled = compile_functions(config, make_workload(config))
    state = compiled.init(compiled.init_key)
    metrics = evaluate(compiled, compiled.model(state), eval_split(config))
    items = [example(1000 + i) for i in range(10)]
    everything = {
        "x": np.stack([item["x"] for item in items]),
        "y": np.stack([item["y"] for item in items]),
        "mask": np.ones(10, np.float32),
    }
    variables = {"params": state.params, **state.model_state}
    variables = jax.device_get(variables)
    total, count = Regression().evaluate(variables, everything)["loss"]
    assert count == 10
    assert metrics == {"loss": pytest.approx(float(total) / 10, rel=1e-6)}


def test_evaluation_refuses_what_it_cannot_merge():
    compiled = functions_of(mesh__data=8)
    state = compiled.init(compiled.init_key)
    with pytest.raises(ValueError, match=r"split has no example"):
        evaluate(compiled, compiled.model(state), [])
    empty = {**eval_split(tiny_config())[0], "mask": np.zeros(8, np.float32)}
    with pytest.raises(ValueError, match=r"split has no example"):
        evaluate(compiled, compiled.model(state), [empty])
    short = {name: x[:6] for name, x in empty.items()}
    with pytest.raises(ValueError, match=r"batch of 6 does not divide over the 8 dev"):
        evaluate(compiled, compiled.model(state), [short])


def test_what_is_compiled_in_little_time_draws_the_same_bits(monkeypatch):
    monkeypatch.setattr(compiled, "_share", compiled._Shared)
    config = tiny_config()

    def drawn():
        functions = compile_functions(config, make_workload(config))
        return jax.device_get(functions.init(jax.random.key(3)).params)

    found = drawn()
    monkeypatch.setattr(compiled, "_compiled_once", lambda platform: None)
    jax.tree.map(np.testing.assert_array_equal, found, drawn())
