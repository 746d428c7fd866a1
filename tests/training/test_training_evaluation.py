"""An evaluation is exact: for any split, batch size and number of devices."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_workload import Regression, make_workload, run, tiny_config

from echo_jax.config import RunSpec
from echo_jax.data.pipeline import eval_batches
from echo_jax.training import evaluate
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.workloads import Task

WEIGHT = 3.0


@dataclass(frozen=True)
class Logarithms(Task):
    """Sums of whole numbers, and a logarithm that is not finite at zero."""

    def init(self, key):
        return {"params": {"weight": jnp.full((), WEIGHT)}}

    def loss(self, variables, batch, key):
        raise NotImplementedError

    def evaluate(self, variables, batch):
        x, mask = batch["x"].astype(jnp.float32), batch["mask"]
        weighed = x * variables["params"]["weight"]
        values = {"sum": weighed, "log": jnp.log(x)}
        return {name: ((v * mask).sum(), mask.sum()) for name, v in values.items()}


def decode(record):
    return {"x": np.int32(record[0])}


@pytest.fixture(scope="module", params=[1, 8], ids="{} devices".format)
def functions(request):
    config = tiny_config(mesh__data=request.param)
    compiled = CompiledFunctions(
        RunSpec.of(config), make_workload(config, task=Logarithms())
    )
    return compiled, compiled.model(compiled.init(compiled.init_key))


@pytest.mark.parametrize("batch_size", [8, 16])
def test_every_example_counts_once_and_padding_never(functions, batch_size):
    rng = np.random.default_rng(0)
    for size in range(1, 18):
        numbers = rng.integers(1, 100, size)
        source = [bytes([number]) for number in numbers]
        batches = eval_batches(source, decode, batch_size=batch_size)
        found = evaluate(*functions, batches)
        # Sums of small whole numbers are exact in any order.
        assert found["sum"] == (numbers * WEIGHT).sum() / size
        np.testing.assert_allclose(found["log"], np.log(numbers).mean(), rtol=1e-6)


def test_batches_that_cannot_be_evaluated_are_refused(functions):
    with pytest.raises(ValueError, match="has no example"):
        evaluate(*functions, eval_batches([], decode, batch_size=8))
    if functions[0].mesh.size > 1:
        with pytest.raises(ValueError, match="batch of 3 does not divide"):
            evaluate(*functions, eval_batches([b"1"], decode, batch_size=3))


@dataclass(frozen=True)
class Predicting(Regression):
    def predict(self, variables, batch):
        return {"twice": 2 * batch["y"]}


class Median:
    """No sum over batches gives it."""

    def __init__(self):
        self.batches, self.values = [], []

    def add(self, batch, outputs):
        assert type(outputs["twice"]) is np.ndarray
        self.batches.append(batch)
        self.values += outputs["twice"][batch["mask"] > 0].tolist()

    def result(self):
        return {"median": float(np.median(self.values))}


@pytest.mark.parametrize("devices", [1, 8])
def test_an_evaluator_is_given_every_batch_in_order_once(devices):
    config = tiny_config(mesh__data=devices)
    workload = replace(make_workload(config, task=Predicting()), evaluator=Median)
    compiled = CompiledFunctions(RunSpec.of(config), workload)
    model = compiled.model(compiled.init(compiled.init_key))
    evaluator = Median()
    found = evaluate(compiled, model, workload.eval_batches(), evaluator=evaluator)
    wanted = list(workload.eval_batches())
    for batch, other in zip(evaluator.batches, wanted, strict=True):
        np.testing.assert_array_equal(batch["y"], other["y"])
    y = np.concatenate([batch["y"] for batch in wanted])[:10]
    assert evaluator.values == (2 * y).tolist()
    assert found.keys() == {"loss", "median"}
    assert found["median"] == pytest.approx(2 * np.median(y))


def test_a_run_logs_and_aims_at_what_an_evaluator_says(tmp_path):
    options = {"updates": 2, "eval_every": 1, "target": -1e6}
    replaced = {"evaluator": Median, "metric": "median", "mode": "max"}
    summary = run(tmp_path, task=Predicting(), replaced=replaced, **options)
    assert summary["metric"] == "median" and summary["reached"]
    assert summary["updates_to_target"] == 0
    assert summary["final"].keys() == {"loss", "median"}
