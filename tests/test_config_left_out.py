"""Defaults of a config file that do not apply to what was typed are left out."""

import pytest

from echo_jax import cli, runs
from echo_jax.config import load_config
from echo_jax.config.check import check_config

OWN = """
from echo_jax.config import default_config
def get_config(variant=""):
    c = default_config()
    c.optim.schedule, c.optim.warmup_updates, c.optim.clip_norm = "cosine", 10, 1.0
    c.optim.weight_decay = 0.1
    if variant == "optax":
        c.optim.name, c.optim.args = "optax.lion", '{"b1": 0.95}'
        c.optim.schedule = "optax.cosine_decay_schedule"
        c.optim.schedule_args = '{"init_value": 1.0, "decay_steps": 10}'
        c.optim.weight_decay = 0.0
    if variant == "piecewise":
        c.optim.schedule, c.optim.boundaries = "piecewise", (50,)
    if variant == "echoed":
        c.echo.factor, c.echo.order, c.echo.buffer = 2.0, "shuffle", 64
        c.echo.after, c.echo.where, c.echo.lanes = "decode", "device", 2
        c.dispatch.mode, c.dispatch.steps = "scan", 4
    if variant == "stochastic":
        c.echo.mode, c.echo.load.start, c.echo.load.end = "stochastic", 0.5, 0.5
    if variant == "adaptive":
        c.echo.mode, c.echo.replay = "adaptive", "pattern:1000"
    if variant == "half":
        c.precision.compute, c.precision.loss_scale = "float16", "dynamic"
        c.precision.growth = 100
    if variant == "local":
        c.local.schedule, c.local.every, c.local.outer = "every", 8, "nesterov"
        c.local.outer_lr = 0.5
    if variant == "target":
        c.target, c.stop_at_target = 0.5, True
    return c
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


@pytest.mark.parametrize(
    ("variant", "typed", "left_out"),
    [
        ("", {"optim.name": "lars"}, {"optim.clip_norm": 0.0}),
        ("", {"optim.name": "lamb"}, {"optim.clip_norm": 0.0}),
        ("", {"optim.name": "optax.lion"}, {"optim.weight_decay": 0.0}),
        (
            "",
            {"optim.name": "lars", "optim.schedule": "onecycle"},
            {
                "optim.clip_norm": 0.0,
                "optim.warmup_updates": 0,
                "optim.start_fraction": 0.04,
            },
        ),
        (
            "",
            {"optim.schedule": "cyclic", "optim.start_fraction": 0.1},
            {"optim.warmup_updates": 0},
        ),
        ("optax", {"optim.name": "sgd"}, {"optim.args": "{}"}),
        ("optax", {"optim.name": "optax.adafactor"}, {"optim.args": "{}"}),
        ("optax", {"optim.schedule": "cosine"}, {"optim.schedule_args": "{}"}),
        ("piecewise", {"optim.schedule": "linear"}, {"optim.boundaries": ()}),
        (
            "echoed",
            {"echo.mode": "adaptive"},
            {"echo.factor": 1.0, "echo.order": "consecutive", "dispatch.mode": "loop"}
            | {"dispatch.steps": 0},
        ),
        (
            "echoed",
            {"echo.mode": "stochastic", "echo.load.start": 0.5, "echo.load.end": 0.5},
            {"echo.factor": 1.0, "echo.order": "consecutive"},
        ),
        ("echoed", {"echo.where": "host"}, {"echo.lanes": 0}),
        ("echoed", {"dispatch.mode": "loop"}, {"dispatch.steps": 0}),
        (
            "stochastic",
            {"echo.mode": "fixed"},
            {"echo.load.start": 1.0, "echo.load.end": 1.0},
        ),
        ("adaptive", {"echo.mode": "fixed"}, {"echo.replay": ""}),
        ("half", {"precision.loss_scale": "static"}, {"precision.growth": 2000}),
        (
            "local",
            {"local.schedule": "none"},
            {"local.every": 1, "local.outer": "mean", "local.outer_lr": 0.7},
        ),
        ("local", {"local.outer": "mean"}, {"local.outer_lr": 0.7}),
        ("target", {"target": 0.0}, {"stop_at_target": False}),
    ],
)
def test_a_default_that_does_not_apply_is_left_out(
    own, variant, typed, left_out, capsys
):
    config = load_config(f"{own}:{variant}", typed)
    check_config(config)
    flat = _flat(config)
    before = _flat(load_config(f"{own}:{variant}"))
    assert flat == before | typed | left_out
    notes = capsys.readouterr().err.splitlines()
    assert {note.partition("=")[0] for note in notes} == {
        f"config.{field}" for field in left_out
    }
    assert len(notes) == len(left_out)


def _flat(config, prefix=""):
    """Returns the fields of a config by their dotted names."""
    flat = {}
    for name, value in config.items():
        is_group = hasattr(value, "items")
        flat |= _flat(value, f"{prefix}{name}.") if is_group else {prefix + name: value}
    return flat


@pytest.mark.parametrize(
    ("variant", "typed", "message"),
    [
        ("", {"optim.name": "lars", "optim.clip_norm": 1.0}, "clip_norm=1.0 has no"),
        ("optax", {"optim.weight_decay": 0.1}, "optim.weight_decay=0.1 belongs to"),
        ("adaptive", {"echo": {"factor": 2.0}}, "echo.factor=2.0 belongs to mode"),
        (
            "",
            {"optim.schedule": "onecycle", "optim.start_fraction": 0.0},
            "optim.start_fraction=0.0 must be above 0",
        ),
    ],
)
def test_what_was_typed_is_refused(own, variant, typed, message):
    config = load_config(f"{own}:{variant}", typed)
    with pytest.raises(ValueError, match=message):
        check_config(config)


@pytest.mark.parametrize(
    ("command", "path", "base"),
    [("train", "lm:tiny", ""), ("study", "quickstart:tiny", "base.")],
)
def test_a_command_says_once_what_it_leaves_out(
    command, path, base, monkeypatch, tmp_path, capsys
):
    caught = []
    for name in ("run_train", "run_study"):
        monkeypatch.setattr(runs, name, lambda config, *_, **__: caught.append(config))
    argv = [command, "--config", path, "--workdir", str(tmp_path)]
    argv += [f"--config.{base}optim.name=lars", f"--config.{base}optim.clip_norm=1"]
    argv += [f"--config.{base}optim.schedule=onecycle"]
    cli.main(argv)
    notes = capsys.readouterr().err
    assert notes.count(f"config.{base}optim.warmup_updates=") == 1
    assert "clip_norm" not in notes
    config = caught[0].base if base else caught[0]
    assert (config.optim.warmup_updates, config.optim.clip_norm) == (0, 1.0)
