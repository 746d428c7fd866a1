"""What is said of a precision, on a task whose numbers are known."""

import copy
import math

import numpy as np
import pytest
from test_training_loss_scale import Faint
from tiny_workload import make_workload, rows_of, run, tiny_config

from echo_jax.training.update.precision_report import all_in_float32, compare_precision

pytestmark = pytest.mark.usefixtures("compiled_soon")


def compared(updates=3, task=None, **fields):
    fields = {f"precision__{name}": value for name, value in fields.items()}
    config = tiny_config(optim__name="sgd", **fields)
    arms = [make_workload(each, task=task) for each in (config, all_in_float32(config))]
    return compare_precision(config, *arms, updates=updates)


@pytest.mark.optimized
def test_a_power_of_two_differs_in_nothing():
    report = compared(loss_scale="static", init=1024.0)
    assert [each.loss_scale for each in report.updates] == [1024] * 3
    for each in report.updates:
        assert each.loss == each.loss_in_float32
        assert (each.loss_differs, each.update_differs, each.not_finite) == (0, 0, 0)
        assert each.zeros == each.zeros_in_float32
    assert report.skipped_updates == 0


@pytest.mark.slow
def test_a_skipped_update_is_one_that_adds_nothing():
    report = compared(6, params="float16", loss_scale="dynamic", init=2.0**17)
    first, *_, last = report.updates
    assert first.is_skipped and not last.is_skipped
    assert first.update_differs == 1 and 0 < first.not_finite < 1
    assert (first.loss_scale, last.not_finite) == (2**17, 0)
    assert report.skipped_updates == sum(each.is_skipped for each in report.updates)


@pytest.mark.slow
def test_rounded_parameters_differ_by_what_rounding_does():
    (first, *_) = compared(params="bfloat16").updates
    assert 1e-5 < first.loss_differs < 0.02
    assert 1e-3 < first.update_differs < 0.5


def test_a_gradient_below_float16_is_seen_to_be_zero():
    (lost,) = compared(updates=1, task=Faint(), params="float16").updates
    assert lost.zeros == 1 > lost.zeros_in_float32
    assert lost.update_differs == 1


@pytest.mark.slow
def test_both_train_as_a_run_does(tmp_path):
    fields = {"optim__name": "sgd", "updates": 3, "log_every": 1}
    for name, params in (("plain", "float32"), ("half", "bfloat16")):
        run(tmp_path / name, precision__params=params, **fields)
    plain, half = (
        [row["loss"] for row in rows_of(tmp_path / name) if row["kind"] == "train"]
        for name in ("plain", "half")
    )
    report = compared(params="bfloat16")
    np.testing.assert_allclose([x.loss for x in report.updates], half, rtol=1e-6)
    found = [x.loss_in_float32 for x in report.updates]
    np.testing.assert_allclose(found, plain, rtol=1e-6)


def test_the_report_is_a_table():
    report = compared(params="float16", loss_scale="dynamic", init=2.0**17, growth=9)
    first, _, headings, row, *_, last = str(report).splitlines()
    assert first.startswith("Computed in float32, stored in float16, loss scale dyna")
    assert len(headings) == len(row)
    assert row.split()[0] == "1" and row.endswith("131072 skipped")
    assert last == f"skipped updates: {report.skipped_updates} of 3"


@pytest.mark.slow
def test_what_float32_does_not_move_has_no_relative_difference():
    config = tiny_config(precision__params="bfloat16", optim__lr=1e-40)
    arms = [make_workload(each) for each in (config, all_in_float32(config))]
    (only,) = compare_precision(config, *arms, updates=1).updates
    assert math.isnan(only.update_differs)


def test_a_config_in_float32_is_refused_and_another_left_as_it_is():
    config = tiny_config(precision__params="bfloat16")
    before = copy.deepcopy(config)
    assert all_in_float32(config).precision.params == "float32"
    assert config == before
    with pytest.raises(
        ValueError, match=r"all in float32, .*--config\.precision\.compute="
    ):
        all_in_float32(tiny_config())
