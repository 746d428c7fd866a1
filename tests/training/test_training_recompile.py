"""Nothing is compiled once training is under way: a recompilation costs minutes."""

from pathlib import Path

import jax
import pytest
from compilations import counted_compilations
from tiny_workload import run

from echo_jax.config import load_config
from echo_jax.runs import run_train
from echo_jax.training.trainer import Trainer

CONFIGS = Path(__file__).parents[2] / "configs"

LM = {
    "data.eval_examples": 10,
    "model.seq_len": 8,
    "model.d_model": 8,
    "model.num_layers": 1,
    "model.d_ff": 8,
}
SHAPES = {"data.train_examples": 64, "data.eval_examples": 10, "model.width": 4}
ON_HOST = {"echo.factor": 2.5, "echo.order": "spread", "echo.buffer": 32}
# Two updates in a dispatch, and one where the host wants to see the state.
ON_DEVICE = {
    **ON_HOST,
    "echo.where": "device",
    "dispatch.mode": "scan",
    "dispatch.steps": 2,
}
RUN = {
    "updates": 12,
    "batch_size": 8,
    "log_every": 3,
    "eval_every": 2,
    "checkpoint_every": 2,
    "optim.warmup_updates": 2,
    "dispatch.mode": "loop",
    "mesh.data": 1,
}


@pytest.mark.usefixtures("compiled_soon")
@pytest.mark.parametrize(
    ("file", "overrides"),
    [
        ("lm", LM | ON_HOST),
        pytest.param("lm", LM | ON_DEVICE, marks=pytest.mark.slow),
        pytest.param("shapes", SHAPES | ON_HOST, marks=pytest.mark.slow),
        pytest.param("shapes", SHAPES | ON_DEVICE, marks=pytest.mark.slow),
    ],
    ids=["lm-host", "lm-device", "shapes-host", "shapes-device"],
)
def test_nothing_is_compiled_after_the_second_step(
    tmp_path, monkeypatch, file, overrides
):
    """Nor by the evaluations and the checkpoints after the first."""
    at_step = []
    dispatch = Trainer.dispatch
    config = load_config(f"{CONFIGS / file}.py:tiny", {**RUN, **overrides})
    # Another test may have compiled the programs of an equal task.
    jax.clear_caches()
    with counted_compilations() as compiled:

        def counting(self, inputs):
            at_step.append((self.totals.updates, len(compiled)))
            dispatch(self, inputs)

        monkeypatch.setattr(Trainer, "dispatch", counting)
        assert run_train(config, tmp_path)["updates"] == 12
    after_two = [count for updates, count in at_step if updates >= 2]
    assert len(after_two) >= 5
    assert after_two[0] > 0
    assert {*after_two, len(compiled)} == {after_two[0]}


@pytest.mark.usefixtures("compiled_soon")
@pytest.mark.parametrize(
    ("start", "others"),
    [
        (
            {"optim__clip_norm": 1.0, "optim__schedule": "cosine"},
            [
                {"optim__lr": 0.02, "optim__b1": 0.8, "optim__b2": 0.9},
                {"optim__weight_decay": 0.1, "optim__clip_norm": 0.5},
                {"optim__warmup_updates": 3, "optim__end_fraction": 0.5},
                {"optim__decay_updates": 7, "seed": 3, "log_every": 3},
            ],
        ),
        (
            {"optim__name": "sgd", "optim__weight_decay": 0.1},
            [{"optim__lr": 0.02, "optim__momentum": 0.5, "optim__weight_decay": 0.2}],
        ),
        ({"optim__name": "optax.lion"}, [{"optim__lr": 0.02}]),
    ],
    ids=["adamw", "sgd", "optax"],
)
def test_other_numbers_are_no_other_program(tmp_path, start, others):
    """So a thousand learning rates in one process are one compilation."""
    found = {run(tmp_path / "start", **start)["params_sha256"]}
    with counted_compilations() as compiled:
        for number, numbers in enumerate(others):
            summary = run(tmp_path / str(number), **{**start, **numbers})
            found.add(summary["params_sha256"])
    assert compiled == []
    # The numbers count nevertheless.
    assert len(found) == 1 + len(others)
