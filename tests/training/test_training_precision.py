"""Parameters in half precision: optimizers compute in float32 all the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_training_large_batch import steps
from test_training_step import batch_of, functions_of
from tiny_workload import tiny_config

from echo_jax.training.update.optim import Optimizer, hyperparams

OPTIMIZERS = ["adamw", "sgd", "lars", "lamb", "rmsprop_warmup", "optax.lion"]


@pytest.mark.parametrize("size", [1e-4, 1.0])
def test_lamb_of_half_precision_is_that_of_single_precision(size):
    """In float16 the square of 1e-4 is 0, and the sum of squares of ones overflows."""
    weights, grads = (
        {"w": jnp.full((512, 512), value, jnp.float16)} for value in (size, 1e-3)
    )
    (step,) = steps(weights, grads, name="lamb", trust_clip=1000.0)
    # Adam's first step is of ones; it becomes as long as the weights.
    np.testing.assert_allclose(step["w"], np.full((512, 512), -size), rtol=0.01)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_optimizer_computes_in_float32(name, dtype):
    """The step of half-precision parameters is that of the same numbers in float32."""
    config = tiny_config(optim__name=name, optim__lr=1e-4)
    optimizer, numbers = Optimizer.from_config(config), hyperparams(config)
    half = {"w": jnp.linspace(0.5, 2, 6).reshape(2, 3).astype(dtype)}
    grads = {"w": jnp.linspace(-1e-4, 3e-4, 6).reshape(2, 3).astype(dtype)}

    def step(params, grads):
        state = optimizer.init(params)
        return optimizer.update(grads, state, params, optimizer.at(0, numbers))

    found = step(half, grads)
    whole = jax.tree.map(lambda x: x.astype(jnp.float32), (half, grads))
    jax.tree.map(np.testing.assert_array_equal, found, step(*whole))
    floats = [x for x in jax.tree.leaves(found) if jnp.issubdtype(x.dtype, jnp.inexact)]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_are_stored_as_they_are_asked_for(dtype):
    compiled, whole = functions_of(precision__params=dtype), functions_of()
    state = compiled.init(compiled.init_key)
    expected = jax.tree.map(
        lambda x: x.astype(dtype), whole.init(whole.init_key).params
    )
    jax.tree.map(np.testing.assert_array_equal, state.params, expected)
    state, _ = compiled.step_on_batch(state, batch_of())
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {dtype}
    others = jax.tree.leaves((state.model_state, state.opt_state))
    assert dtype not in {x.dtype.name for x in others}
