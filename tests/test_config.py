"""Configs: refused values, files that fail, defaults that are left out, studies."""

import re
import sys
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from echo_jax import cli
from echo_jax.config import (
    RunSpec,
    arm_names,
    default_config,
    default_study,
    load_config,
    load_with_flags,
    set_arms,
)
from echo_jax.runs import ConfigRefusedError, run_study
from echo_jax.searches import protocol_of

# Flags of a training, and parts of the line that refuses them. D is an echo on devices.
REFUSED = """
batch_size=0 | config.batch_size=0 must be at least 1; set --config
seed=-1 | config.seed=-1 must be at least 0
seed=4294967296 | config.seed=4294967296 must be below 4294967296
echo.factor=0.5 | config.echo: echo factor 0.5 is outside [1
echo.order=random | config.echo.order='random' is unknown; use
echo.stage=crop | config.echo.stage='crop' ... one of read,
optim.lr=0.0 | config.optim.lr=0.0 must be above 0
optim.schedule=piecewise optim.boundaries=(5,12) | above the 10 of ... =(40,)
optim.boundaries=(5,9.5) | boundaries=(5, 9.5) must be a whole number
optim.boundaries=(5,) | boundaries=(5,) needs config.optim.schedule=piecewise
optim.momentum=1.0 | config.optim.momentum=1.0 must be below 1
optim.end_fraction=1.5 | end_fraction=1.5 must be at most 1
target=nan | config.target=nan must be finite
stop_at_target=True | config.stop_at_target=True needs config.target!=0.0
echo.buffer_on=tpu | config.echo.buffer_on='tpu' must be one of host, dev
echo.buffer_on=device echo.stage=batch | 'device' needs config.echo.stage=decode or aug
echo.lanes=2 | lanes=2 needs config.echo.buffer_on=device
echo.replay=x | replay='x' ... needs config.echo.mode=adaptive
echo.mode=adaptive echo.replay=pattern:1100000000001 | must be 6 or more ... .max_uses=6
echo.mode=adaptive echo.min_uses=5 | min_uses=5 ... ... --config.echo.min_uses=4
echo.min_uses=2 | min_uses=2 needs config.echo.mode=adaptive ... echo.min_uses=1
echo.mode=adaptive dispatch.steps=2 | steps=2 needs config.echo.mode!=adaptive; set
D echo.lanes=24 | not a multiple of the 24 devices and lanes; ... batch_size=48
D echo.mode=adaptive echo.factor=2.0 | needs config.echo.mode=fixed ... .echo.max_uses
D echo.mode=adaptive data.prefetch=0 | prefetch=0 reads when asked ... data.prefetch=4
data.pipeline=torch | config.data.pipeline='torch' ... grain, tf
data.pipeline=tfdata data.workers=2 | workers=2 needs data.pipeline=grain; ... --config
data.threads=-1 | config.data.threads=-1 must be at least 0; set
data.storage.latency_s=-1.0 | data.storage.latency_s=-1.0 must be a finite number >= 0
echo.buffer=0 | echo.buffer must ... Use --config.echo.buffer=1.
echo.fetch.start=0.5 echo.fetch.end=0.5 | start=0.5 needs config.echo.mode=stoch
D echo.mode=stochastic echo.fetch.end=0.5 | schedule has end=0.5 other than start=1
D echo.mode=stochastic echo.fetch.start=0.0 | fetch.start=0.0 must be a prob
mesh.data=0 | config.mesh.data=0 times ... set --config.mesh.data=-1
optim.schedule=cosine optim.warmup_updates=60 | warmup_updates=60 must be below the 60
updates=30 profile.updates=5 profile.start=26 | start=26 ends after ... start=25
batch_size=10 mesh.data=2 mesh.fsdp=2 | is not a multiple of the 4 ... mesh.data=1
echo.factor=3.0 echo.order=spread | buffer=1 is too small for order
echo.facter=3 | no field 'echo.facter', did you mean 'echo.factor'?; 'echo-jax conf
echo=3 | config.echo is a group; set one of its fields: echo.buffer
updates=True | config.updates=True must be a whole number
seed=1.5 | config.seed=1.5 must be a whole number, such as 10 or 1e3; it is 0
optim.lr=fast | lr='fast' must be a number, such as 0.1 or 1e-3
stop_at_target=2 | stop_at_target=2 must be true or false
optim.boundaries=(5, | '(5,' must be values in parentheses
echo.factor | config.echo.factor='' must be a number, such as 0.1 or 1e-3; it is 1.0
precision.compute=bf16 | compute='bf16' must be one of float32,
model.dtype=float32 | config has no field 'model.dtype'; 'echo-jax configs
workload=lmm | lmm
optim.name=optax.nothing | config.optim.name='optax.nothing' is no public function
data.source=none.txt | none.txt
data.train_examples=15 | more than the 15 examples ... set --config.batch_size=8, or
"""


@pytest.mark.parametrize("row", REFUSED.strip().split("\n"))
def test_a_value_is_refused_with_its_field_and_the_fix(row, tmp_path, capsys):
    typed, parts = row.split(" | ")
    typed = typed.replace("D ", "echo.buffer_on=device echo.stage=decode ")
    flags = [f"--config.{each}" for each in typed.split()]
    folder = tmp_path / "x"
    argv = ["train", "--config", "lm:tiny", "--workdir", str(folder), *flags]
    assert cli.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("echo-jax train: ")
    assert not re.search(r"config\.config|(\b\w+\.)\1", line)  # Named once.
    at = 0
    for part in parts.split("..."):
        assert part.strip() in line[at:], line
        at = line.index(part.strip(), at)
    # A corrected command must not find the folder taken.
    assert not folder.exists()


def test_a_frozen_config_is_changed_by_dotted_names():
    run = RunSpec.of(load_config("lm:tiny"))
    fields = {"seed": 7, "optim.lr": 0.5, "data.storage.latency_s": 0.25}
    changed = run.changed(fields)
    assert (changed.seed, changed.optim.lr) == (7, 0.5)
    assert changed.data.storage.latency_s == 0.25 and run.data.storage.latency_s == 0
    restored = {"seed": 0, "optim.lr": run.optim.lr, "data.storage.latency_s": 0.0}
    assert changed.changed(restored) == run
    for name, value in (("data.storage.latency_s", -1.0), ("optim.lr", 0.0)):
        with pytest.raises(ValueError, match=rf"^config\.{name}={value} must be"):
            run.changed({name: value})


def test_numbers_are_flags_as_people_write_them():
    flags = ("updates=1e3", "seed=1_0", "model.positions=sinusoidal", "echo.factor=3")
    typed = [f"--config.{each}" for each in (*flags, "mesh.data=-1", "stop_at_target")]
    config = load_with_flags("lm:tiny", typed)
    found = (config.updates, config.seed, config.echo.factor, config.mesh.data)
    assert repr(found) == "(1000, 10, 3.0, -1)"
    assert (config.model.positions, config.stop_at_target) == ("sinusoidal", True)


MADE = """
from echo_jax.config import default_config
def get_config(variant=""):
    c = default_config()
    {}
    return c
"""


def test_a_variant_is_loaded_with_overrides_and_locked(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(MADE.format("c.updates = {'': 500, 'tiny': 5}[variant]"))
    assert load_config(str(own)).updates == 500
    changes = {"echo": {"factor": 2}, "optim.lr": 1, "data": {"storage.latency_s": 0.5}}
    config = load_config(f"{own}:tiny", changes)
    found = config.updates, config.echo.factor, config.echo.order, config.optim.lr
    assert found == (5, 2.0, "consecutive", 1.0)
    assert config.data.storage.latency_s == 0.5
    with pytest.raises(AttributeError):
        config.batchsize = 3
    with pytest.raises(AttributeError, match=r"mean 'echo\.factor'\?; 'echo-jax"):
        load_config(str(own), {"echo.facto": 2.0})
    with pytest.raises(TypeError, match=r"config\.batch_size=1\.5 must be a whole"):
        load_config(str(own), {"batch_size": 1.5})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "defines no get_config"),
        ("def get_config(:\n", "line 1, fails: SyntaxError: invalid syntax"),
        ("\nimport nothing_there\n", "line 2, fails: ModuleNotFoundError: No module"),
        ("def get_config():\n  return {}['x']\n", "line 2, fails: KeyError: 'x'"),
        ("def get_config():\n  raise ValueError('mine')\n", "^mine$"),
        ("def get_config(a, b):\n  pass\n", "own.py' needs a variant: give "),
        (MADE.format("c.updates = 'ten'"), "line 5, fails: TypeError: .*'updates'"),
        (MADE.format("c.echo.factr = 9"), 'line 5, .* Did you mean "factor" instead'),
    ],
)
def test_a_file_that_fails_is_named_with_its_line(tmp_path, text, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(text)
    with pytest.raises((AttributeError, ValueError), match=message):
        load_config("own.py")


def test_a_config_may_import_a_file_beside_it(tmp_path):
    (tmp_path / "beside_the_config.py").write_text("UPDATES = 7\n")
    text = "from beside_the_config import UPDATES\n" + MADE.format("c.updates = 7")
    (tmp_path / "one.py").write_text(text)
    before = list(sys.path)
    assert load_config(str(tmp_path / "one.py")).updates == 7
    assert sys.path == before
    text = "def get_config():\n    raise AssertionError\n"
    (tmp_path / "two.py").write_text(text)
    with pytest.raises(ValueError, match=r"two\.py' has no variants; leave :tiny out"):
        load_config(f"{tmp_path / 'two.py'}:tiny")


OWN = MADE.format("""
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
        c.echo.factor, c.echo.order, c.echo.buffer = 2.0, "window_shuffle", 64
        c.echo.stage, c.echo.buffer_on, c.echo.lanes = "decode", "device", 2
        c.dispatch.steps = 4
    if variant == "adaptive":
        c.echo.mode, c.echo.replay = "adaptive", "pattern:1000"
    if variant == "half":
        c.precision.compute, c.precision.loss_scale = "float16", "dynamic"
        c.precision.growth = 100
    if variant == "local":
        c.local.sync_schedule, c.local.sync_every = "every", 8
        c.local.outer = "nesterov"
        c.local.outer_lr = 0.5
""")
FIXED = {"echo.factor": 1.0, "echo.order": "consecutive"}
ONECYCLE = {"optim.clip_norm": 0.0, "optim.warmup_updates": 0}
ONECYCLE |= {"optim.start_fraction": 0.04}


@pytest.mark.parametrize(
    ("variant", "typed", "left_out"),
    [
        ("", {"optim.name": "lars"}, {"optim.clip_norm": 0.0}),
        ("", {"optim.name": "optax.lion"}, {"optim.weight_decay": 0.0}),
        ("", {"optim.name": "lars", "optim.schedule": "onecycle"}, ONECYCLE),
        ("piecewise", {"optim.schedule": "linear"}, {"optim.boundaries": ()}),
        ("echoed", {"echo.mode": "adaptive"}, FIXED | {"dispatch.steps": 1}),
        ("echoed", {"echo.buffer_on": "host"}, {"echo.lanes": 0}),
        ("echoed", {"local.sync_schedule": "every"}, {"dispatch.steps": 1}),
        ("adaptive", {"echo.mode": "fixed"}, {"echo.replay": ""}),
        ("half", {"precision.loss_scale": "static"}, {"precision.growth": 2000}),
        (
            "local",
            {"local.sync_schedule": "none"},
            {"local.sync_every": 1, "local.outer": "mean", "local.outer_lr": 0.7},
        ),
    ],
)
def test_a_default_that_does_not_apply_is_left_out(
    variant, typed, left_out, tmp_path, capsys
):
    own = tmp_path / "own.py"
    own.write_text(OWN)
    found = _flat(load_config(f"{own}:{variant}", typed))
    notes = capsys.readouterr().err.splitlines()
    assert found == _flat(load_config(f"{own}:{variant}")) | typed | left_out
    named = [note.partition("=")[0] for note in notes]
    assert sorted(named) == sorted(f"config.{field}" for field in left_out)


def _flat(config, prefix=""):
    flat = {}
    for name, value in config.items():
        is_group = hasattr(value, "items")
        flat |= _flat(value, f"{prefix}{name}.") if is_group else {prefix + name: value}
    return flat


def test_what_is_typed_and_does_not_apply_is_refused_once_the_rest_is_left_out(
    tmp_path, capsys
):
    argv = ["study", "--config", "quickstart:storage", "--workdir", str(tmp_path / "x")]
    typed = ("optim.name=lars", "optim.clip_norm=1", "optim.schedule=onecycle")
    assert cli.main([*argv, *(f"--config.base.{each}" for each in typed)]) == 2
    notes = capsys.readouterr().err
    assert notes.count("config.base.optim.warmup_updates=") == 1
    assert "config.optim.clip_norm=1.0 needs config.optim.name!=lars" in notes


SPACE = {"optim": {"lr": "log:1e-4:1e-2"}}
GIVEN = {"mode": "adaptive", "buffer": 128, "replay": "pattern:1000"}


def study(**changes):
    made = default_study("a study", default_config(), {"b": {}, "a": {"seed": 1}})
    made.update_from_flattened_dict(changes)
    return made


def test_arms_run_in_the_order_in_which_they_are_written():
    made = study()
    assert arm_names(made) == ["b", "a"]
    set_arms(made, {"z": {}, "b": {}})
    assert arm_names(made) == ["z", "b"] and "a" not in made.arms
    # Those that the order does not name come last.
    made.arms = ConfigDict({"c": {}, "z": {}, "b": {}, "d": {}})
    assert arm_names(made) == ["z", "b", "c", "d"]
    with pytest.raises(ValueError, match=r"not accept dots .* key a\.b"):
        set_arms(made, {"a.b": {}})


def test_a_protocol_is_what_the_fields_say():
    made = study()
    assert protocol_of(made) is None
    made.search.space = ConfigDict(SPACE)
    made.update_from_flattened_dict({"search.points": 8, "confirm.streams": 4})
    found = protocol_of(made)
    assert (found.variants, found.points, found.repeats) == (("b", "a"), 8, 5)
    assert (found.num_seeds, found.seed, found.cut) == (4, 0, 2.0)
    # Without a search there is nothing to repeat.
    made.search.space = ConfigDict()
    units = [str(unit) for unit in protocol_of(made).units()]
    assert units == ["b.confirm-0", "a.confirm-0"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"search.points": 0}, r"search\.points=0 must be at least 1"),
        ({"confirm.streams": -1}, r"streams=-1 must be at least 0"),
        ({"stop.cut": 0.5}, r"cut=0.5 would end the best trials; set .*cut=2"),
        ({"stop.cut": float("nan")}, "cut=nan must be finite"),
        ({"storage_ratio": 4.0}, r"storage_ratio=4 is for seconds, and a search"),
        (
            {"arms.a": {"echo": {"mode": "adaptive"}}},
            "variant a: a trial must not depend",
        ),
        # With its decisions given it is a trial, on more devices than there are.
        ({"arms.a": {"echo": GIVEN, "mesh": {"data": 16}}}, "variant a: .*16"),
        ({"arms.a.seeds": 1}, "variant a: .*seeds"),
        ({"arms": {"a b": {}}}, "variant 'a b' cannot name a folder; use lett"),
    ],
)
def test_impossible_values_are_refused_with_the_fix(changes, message, tmp_path):
    made = study()
    with made.unlocked():
        for name, value in changes.items():
            *groups, last = name.split(".")
            group = made
            for part in groups:
                group = group[part]
            group[last] = ConfigDict(value) if isinstance(value, dict) else value
    made.search.space = ConfigDict(SPACE)
    with pytest.raises(ConfigRefusedError, match=message):
        run_study(made, tmp_path)
    assert not [*tmp_path.iterdir()]
