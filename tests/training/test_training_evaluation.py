"""An evaluation is exact: for any split, batch size and number of devices."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_workload import make_workload, tiny_config

from echo_jax.data.pipeline.evaluation import eval_batches
from echo_jax.training.evaluation import evaluate
from echo_jax.training.trainer import compile_functions
from echo_jax.workloads.base import Task

WEIGHT = 3.0


@dataclass(frozen=True)
class Logarithms(Task):
    """Sums of whole numbers, and a logarithm that is not finite at zero."""

    def init(self, key):
        del key
        return {"params": {"weight": jnp.full((), WEIGHT)}}

    def loss(self, variables, batch, key):
        raise NotImplementedError

    def evaluate(self, variables, batch):
        x, mask = batch["x"].astype(jnp.float32), batch["mask"]
        weighed = x * variables["params"]["weight"]
        values = {"sum": weighed, "log": jnp.log(x), "root": jnp.log(x) * x}
        return {
            name: ((value * mask).sum(), mask.sum()) for name, value in values.items()
        }


def decode(record):
    return {"x": np.int32(record[0])}


@pytest.fixture(scope="module", params=[1, 8], ids="{} devices".format)
def functions(request):
    config = tiny_config(mesh__data=request.param)
    compiled = compile_functions(config, make_workload(config, task=Logarithms()))
    return compiled, compiled.model(compiled.init(compiled.init_key))


@pytest.mark.parametrize("batch_size", [8, 16])
def test_every_example_counts_once_and_padding_never(functions, batch_size):
    compiled, model = functions
    rng = np.random.default_rng(0)
    for size in range(1, 18):
        numbers = rng.integers(1, 100, size)
        source = [bytes([number]) for number in numbers]
        batches = eval_batches(source, decode, batch_size=batch_size)
        assert {len(batch["x"]) for batch in batches} == {batch_size}
        found = evaluate(compiled, model, batches)
        # Sums of small whole numbers are exact in any order.
        assert found["sum"] == (numbers * WEIGHT).sum() / size
        np.testing.assert_allclose(found["log"], np.log(numbers).mean(), rtol=1e-6)
        expected = (np.log(numbers) * numbers).mean()
        np.testing.assert_allclose(found["root"], expected, rtol=1e-6)


def test_a_batch_that_does_not_divide_over_the_devices_is_refused(functions):
    compiled, model = functions
    if compiled.mesh.size == 1:
        return
    with pytest.raises(ValueError, match="batch of 3 does not divide"):
        evaluate(compiled, model, eval_batches([b"1"], decode, batch_size=3))


def test_a_split_without_examples_is_refused(functions):
    compiled, model = functions
    with pytest.raises(ValueError, match="has no example"):
        evaluate(compiled, model, eval_batches([], decode, batch_size=8))
