import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_workload import make_workload, tiny_config

from echo_jax.config.check import check_config
from echo_jax.training.trainer import compile_functions
from echo_jax.training.update.optim import Optimizer, hyperparams

pytestmark = pytest.mark.usefixtures("compiled_soon")


def config_of(**fields):
    config = tiny_config(optim__lr=1.0, optim__end_fraction=0.2, optim__decay_updates=6)
    config.optim.update(fields)
    return config


def updated(params, grads_of, steps, **fields):
    config = config_of(**fields)
    optimizer, numbers = Optimizer.from_config(config), hyperparams(config)
    state = optimizer.init(params)
    for done in range(steps):
        grads = grads_of(params)
        current = optimizer.at(done, numbers)
        changes, state = optimizer.update(grads, state, params, current)
        params = optax.apply_updates(params, changes)
    return params


def test_sgd_with_nesterov_momentum_by_hand():
    # v1 = g = 2, step 2 + .5*2 = 3; v2 = 2 + .5*2 = 3, step 2 + .5*3 = 3.5.
    params = updated(
        jnp.zeros(()), lambda _: jnp.full((), 2.0), 2, name="sgd", momentum=0.5, lr=0.1
    )
    np.testing.assert_allclose(params, -0.65, rtol=1e-6)
    plain = updated(
        jnp.zeros(()),
        lambda _: jnp.full((), 2.0),
        2,
        name="sgd",
        momentum=0.5,
        nesterov=False,
        lr=0.1,
    )
    np.testing.assert_allclose(plain, -0.5, rtol=1e-6)


@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_weight_decay_is_for_matrices_unless_vectors_are_asked_for(name, vectors):
    params = {"bias": jnp.ones(2), "matrix": jnp.ones((2, 2))}
    new = updated(
        params,
        lambda p: jax.tree.map(jnp.zeros_like, p),
        1,
        name=name,
        weight_decay=0.1,
        decay_vectors=vectors,
        lr=0.5,
        momentum=0.0,
    )
    kept = 0.95 if vectors else 1.0
    np.testing.assert_allclose(new["bias"], kept * params["bias"], rtol=1e-6)
    np.testing.assert_allclose(new["matrix"], 0.95 * params["matrix"], rtol=1e-6)


def test_clips_by_the_global_norm():
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    grads = {"a": jnp.float32(3.0), "b": jnp.float32(4.0)}
    new = updated(
        params, lambda _: grads, 1, name="sgd", momentum=0.0, lr=1.0, clip_norm=1.0
    )
    np.testing.assert_allclose([new["a"], new["b"]], [-0.6, -0.8], rtol=1e-6)


@pytest.mark.parametrize(("b1", "expected"), [(0.9, -1.0), (0.1, 0.0)])
def test_an_optimizer_of_optax_is_found_by_name(b1, expected):
    """Lion by hand: it steps by the sign of an average, m = 0.01 after the first."""
    grads = iter([1.0, -0.005])
    new = updated(
        jnp.zeros(()), lambda _: jnp.float32(next(grads)), 2, name="optax.lion",
        args=json.dumps({"b1": b1, "weight_decay": 0.0}), lr=0.5,
    )  # fmt: skip
    # 0.9 * 0.01 - 0.1 * 0.005 is above zero, 0.1 * 0.01 - 0.9 * 0.005 below.
    np.testing.assert_allclose(new, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("optax.adafactor", {"min_dim_size_to_factor": 2}),
        ("optax.lion", {"b1": 0.8}),
        ("optax.novograd", {}),
        ("optax.contrib.ademamix", {"b3": 0.99}),
        ("optax.contrib.dadapt_adamw", {}),
        ("optax.contrib.muon", {"weight_decay": 0.1}),
        ("optax.contrib.prodigy", {}),
    ],
)
def test_an_optimizer_of_optax_steps_as_optax_does(name, args):
    params = {"bias": jnp.ones(3), "matrix": jnp.arange(6.0).reshape(3, 2)}

    def grads_of(params):
        return jax.tree.map(lambda x: 0.1 * x + jnp.cos(x), params)

    rates = {"schedule": "constant", "warmup_updates": 0, "lr": 0.02}
    found = updated(params, grads_of, 2, name=name, args=json.dumps(args), **rates)
    module = optax.contrib if "contrib" in name else optax
    optimizer = getattr(module, name.rpartition(".")[2])(0.02, **args)
    expected, state = params, optimizer.init(params)
    for _ in range(2):
        changes, state = optimizer.update(grads_of(expected), state, expected)
        expected = optax.apply_updates(expected, changes)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected
    )
    assert not np.allclose(found["matrix"], params["matrix"], rtol=1e-6)


def test_an_optimizer_that_keeps_parameters_begins_with_those_that_were_taken():
    """Prodigy keeps those that it began with."""
    config = tiny_config(optim__name="optax.contrib.prodigy")
    compiled = compile_functions(config, make_workload(config))
    taken = {"params": {"bias": np.full(16, 3.0, np.float32)}}
    state = compiled.init(compiled.init_key, taken)
    kept = [np.all(x == 3) for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert sum(kept) == 1


def test_the_arguments_of_an_optimizer_of_optax_count():
    def after(args):
        new = updated(
            {"matrix": jnp.ones((2, 2))}, lambda p: jax.tree.map(jnp.zeros_like, p), 1,
            name="optax.contrib.muon", args=args, lr=0.5,
        )  # fmt: skip
        return float(new["matrix"][0, 0])

    assert after("{}") == pytest.approx(1.0)
    # Decoupled: 1 - 0.5 * 0.1.
    assert after('{"weight_decay": 0.1}') == pytest.approx(0.95)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "adam"}, "name='adam' is no public optimizer of optax; use adamw,"),
        ({"name": "optax._src"}, "name='optax._src' is no public optimizer"),
        ({"name": "optax.contrib"}, "name='optax.contrib' is no public optimizer"),
        ({"name": "os.system"}, "name='os.system' is no public optimizer"),
        ({"name": "optax.chain"}, "name='optax.chain' is no public optimizer"),
        ({"name": "optax.cosine_decay_schedule"}, "is no public optimizer"),
        # It searches along a line, and asks for the loss as a function.
        ({"name": "optax.lbfgs"}, "'optax.lbfgs' cannot train with config.optim.args"),
        (
            {"name": "optax.contrib.schedule_free_adamw"},
            "trains an average that is no parameter.*warmup_stable_decay",
        ),
        ({"name": "optax.lion", "args": '{"b3": 1}'}, "cannot train with .*b3"),
        ({"name": "optax.lion", "args": "b1=1"}, "is no JSON object of numbers"),
        ({"name": "optax.lion", "args": '{"mask": {}}'}, "is no JSON object"),
        ({"name": "optax.lion", "args": '{"learning_rate": 1}'}, "use config.optim.lr"),
        ({"name": "optax.lion", "weight_decay": 0.1}, "has it in config.optim.args"),
        ({"name": "sgd", "args": '{"b1": 0.5}'}, "belongs to optimizers of optax"),
    ],
)
def test_what_is_no_optimizer_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        check_config(config_of(**fields))


def test_numbers_are_no_part_of_what_is_compiled():
    def compiled(**fields):
        return Optimizer.from_config(config_of(**fields))

    numbers = {"lr": 0.1, "b1": 0.8, "b2": 0.9, "end_fraction": 0.5, "momentum": 0.5}
    assert compiled(**numbers) == compiled(warmup_updates=3, weight_decay=0.1)
    assert compiled(name="sgd", momentum=0.1) == compiled(name="sgd", momentum=0.2)
    assert compiled(clip_norm=1.0) == compiled(clip_norm=2.0)
    # What there is a buffer or an operation for is.
    assert compiled(name="sgd", momentum=0.0) != compiled(name="sgd", momentum=0.2)
    assert compiled(clip_norm=0.0) != compiled(clip_norm=2.0)
    assert compiled(name="lars", trust_coefficient=0.1) == compiled(name="lars")
    assert compiled(name="lamb", trust_clip=2.0) == compiled(name="lamb", eps=1e-6)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Goyal et al. 2017: 0.1 at 256 is 3.2 at 8,192.
        ({"scale": "linear"}, {"lr": 3.2, "b1": 0.9, "eps": 1e-8}),
        # 1 - 32 (1 - b), and over the root of 32.
        (
            {"scale": "sqrt", "b1": 0.99, "b2": 0.999},
            {"lr": 0.1 * 32**0.5, "b1": 0.68, "b2": 0.968, "eps": 1e-8 / 32**0.5},
        ),
        ({}, {"lr": 0.1, "b1": 0.9, "eps": 1e-8}),
    ],
)
def test_the_learning_rate_follows_the_batch(fields, expected):
    config = config_of(lr=0.1, reference_batch=256, **fields)
    config.batch_size = 8192
    check_config(config)
    numbers = hyperparams(config).by_name()
    found = {name: float(numbers[name]) for name in expected}
    assert found == pytest.approx(expected, rel=1e-5)


def test_means_that_would_forget_at_once_are_refused():
    config = config_of(scale="sqrt", reference_batch=256)
    config.batch_size = 8192
    with pytest.raises(ValueError, match=r"b1=0.9 would be below 0 .*b1=0.996875"):
        check_config(config)
    config.optim.b1 = 0.996875
    with pytest.raises(ValueError, match=r"b2=0.95 would be below 0 in a batch 32 "):
        check_config(config)
