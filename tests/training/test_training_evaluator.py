"""What judges a split on the host, beside sums: see `Workload.evaluator`."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from tiny_workload import Regression, make_workload, tiny_config

from echo_jax.training import train
from echo_jax.training.evaluation import evaluate
from echo_jax.training.trainer import compile_functions


@dataclass(frozen=True)
class Predicting(Regression):
    def predict(self, variables, batch):
        del variables
        return {"twice": 2 * batch["y"]}


class Median:
    """No sum over batches gives it."""

    def __init__(self):
        self.batches, self.values = [], []

    def add(self, batch, outputs):
        assert type(outputs["twice"]) is np.ndarray
        np.testing.assert_array_equal(outputs["twice"], 2 * batch["y"])
        self.batches.append(batch)
        self.values += outputs["twice"][batch["mask"] > 0].tolist()

    def result(self):
        return {"median": float(np.median(self.values))}


def judged(devices):
    config = tiny_config(mesh__data=devices)
    workload = replace(make_workload(config, task=Predicting()), evaluator=Median)
    compiled = compile_functions(config, workload)
    model = compiled.model(compiled.init(compiled.init_key))
    evaluator = Median()
    metrics = evaluate(compiled, model, workload.eval_batches(), evaluator=evaluator)
    return metrics, evaluator, evaluate(compiled, model, workload.eval_batches())


def test_an_evaluator_is_given_every_batch_in_order_once():
    metrics, evaluator, without = judged(devices=1)
    wanted = list(make_workload(tiny_config()).eval_batches())
    assert len(evaluator.batches) == len(wanted) == 2
    for batch, other in zip(evaluator.batches, wanted, strict=True):
        np.testing.assert_array_equal(batch["y"], other["y"])
    assert len(evaluator.values) == 10
    y = np.concatenate([batch["y"] for batch in wanted])[:10]
    assert metrics == {**without, "median": pytest.approx(2 * np.median(y))}
    assert without.keys() == {"loss"}


def test_devices_do_not_matter_to_an_evaluator():
    one, eight = judged(devices=1)[0], judged(devices=8)[0]
    assert one["median"] == eight["median"]


def test_a_run_logs_and_aims_at_what_an_evaluator_says(tmp_path):
    config = tiny_config(updates=2, eval_every=1, target=1e6)
    workload = replace(
        make_workload(config, task=Predicting()), evaluator=Median, metric="median"
    )
    summary = train(config, workload, tmp_path)
    assert summary["metric"] == "median" and summary["reached"]
    assert summary["updates_to_target"] == 0
    assert summary["final"].keys() == {"loss", "median"}
