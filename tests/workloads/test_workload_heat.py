"""The workload heat: its solver against a plain one, its data, and a training."""

import itertools
import math
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import echo_jax as ej
from echo_jax.config import load_config
from echo_jax.inference import evaluate_run, write_evaluation
from echo_jax.runs import run_train, show_examples
from echo_jax.workloads import build, heat

KELVIN = st.floats(100, 500, width=32)


def solved(plate, edges, steps):
    record = np.array([plate, *edges, steps], np.float32)
    return heat.solve(record.tobytes())


def test_a_step_solves_the_equation_that_the_page_states():
    """Implicit Euler, point by point: what leaves a point reaches its neighbours."""
    size, flow = heat.GRID, 0.1 * 0.1 * (heat.GRID + 1) ** 2
    edges, before = (150.0, 250.0, 350.0, 450.0), np.full((size, size), 200.0)
    for steps in (1, 2):
        field = solved(200.0, edges, steps)["y"].reshape(size, size) * 115.0 + 300.0
        around = np.pad(field, 1)
        around[0], around[-1], around[:, 0], around[:, -1] = edges
        ways = ((0, 1), (2, 1), (1, 0), (1, 2))
        neighbours = sum(
            around[a : a + size, b : b + size].astype(np.float64) for a, b in ways
        )
        found = (1 + 4 * flow) * field - flow * neighbours
        np.testing.assert_allclose(found, before, atol=2e-2)
        before = field


@settings(max_examples=20, deadline=None)
@given(KELVIN, st.tuples(KELVIN, KELVIN, KELVIN, KELVIN), st.integers(1, 5))
def test_no_point_is_hotter_or_colder_than_plate_and_edges(plate, edges, steps):
    item = solved(plate, edges, steps)
    found = item["y"] * 115.0 + 300.0
    assert min(plate, *edges) - 0.01 <= found.min()
    assert found.max() <= max(plate, *edges) + 0.01
    assert (
        item["x"].shape == (6,) and (item["x"].dtype, found.dtype) == (np.float32,) * 2
    )


@pytest.mark.parametrize("threads", [1, 4])
def test_examples_follow_from_their_index_alone(threads):
    fields = {"batch_size": 4, "data.threads": threads}
    workload = build(load_config("heat:tiny", fields))
    spec = ej.EchoSpec(batch_size=4)
    with closing(iter(workload.train_dataset(spec))) as stream:
        first = [*itertools.islice(stream, 3)]
        state = stream.get_state()
        rest = [*itertools.islice(stream, 2)]
        stream.set_state(state)
        for before, after in zip(rest, stream, strict=False):
            np.testing.assert_array_equal(before["y"], after["y"])
    fields = np.concatenate([batch["y"] for batch in first])
    assert len(np.unique(fields, axis=0)) == 12
    again = build(load_config("heat:tiny", {"batch_size": 12}))
    with closing(iter(again.train_dataset(ej.EchoSpec(batch_size=12)))) as stream:
        np.testing.assert_array_equal(next(stream)["y"], fields)


def test_a_training_learns_and_its_model_predicts_temperatures(tmp_path):
    summary = run_train(load_config("heat:tiny", {"echo.factor": 2.0}), tmp_path)
    final = summary["final"]
    assert final["loss"] < 0.75
    assert math.isclose(final["error_k"], 115 * math.sqrt(final["loss"]))
    item = solved(300.0, (300.0,) * 4, 5)
    kelvin = ej.load_run(tmp_path).predict({"x": item["x"][None]})["kelvin"]
    assert kelvin.shape == (1, heat.GRID, heat.GRID)
    page = show_examples(tmp_path, tmp_path / "looked_at", updates=2).read_text()
    assert "update 1, fresh: x: " in page and "update 1, repeat 1: x: " in page
    run = ej.load_run(tmp_path)
    assert "error_k" in write_evaluation(run, evaluate_run(run), tmp_path).read_text()
    with pytest.raises(ValueError, match=r"Use --config\.data\.source=solver"):
        build(load_config("heat:tiny", {"data.source": "synthetic"}))
