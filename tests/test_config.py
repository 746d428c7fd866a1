"""Configs: values that are refused, files that fail, and defaults that are left out."""

import sys
from pathlib import Path

import pytest

from echo_jax import cli, runs
from echo_jax.config import (
    check_config,
    default_config,
    describe_echo,
    load_config,
    override,
)

# Flags of a training, and parts of the line that refuses them. D is an echo on devices.
REFUSED = """
batch_size=0 | config.batch_size=0 must be at least 1; set --config
updates=0 | config.updates=0 must be at least 1
seed=-1 | config.seed=-1 must be at least 0
seed=4294967296 | config.seed=4294967296 must be below 4294967296
echo.factor=0.5 | config.echo: echo factor 0.5 is outside [1
echo.factor=nan | config.echo: echo factor nan is not
echo.factor=inf | config.echo: echo factor inf is not
echo.order=random | config.echo.order='random' is unknown; use
echo.after=crop | config.echo.after='crop' ... one of read,
optim.lr=0.0 | config.optim.lr=0.0 must be above 0
optim.schedule=piecewise | boundaries=() must be rising ... above the 10 of
optim.schedule=piecewise optim.boundaries=(5,5) | boundaries=(5, 5) must be rising
optim.schedule=piecewise optim.boundaries=(5,9.5) | boundaries=(5, 9.5) must be rising
optim.schedule=piecewise optim.boundaries=(5,9) optim.warmup_updates=5 | above the 5 of
optim.boundaries=(5,) | boundaries=(5,) needs --config.optim.schedule=piecewise
optim.momentum=1.0 | config.optim.momentum=1.0 must be below 1
optim.end_fraction=1.5 | end_fraction=1.5 must be at most 1
target=nan | config.target=nan must be finite
stop_at_target=True | config.stop_at_target=True needs a target
echo.cap=0 | config.echo.cap=0 must be at least 1
echo.where=tpu | config.echo.where='tpu' must be one of host, dev
echo.where=device echo.after=batch | goes with echo.where=host; ... .echo.after=decode
echo.lanes=2 | lanes=2 needs --config.echo.where=device
echo.buffer_bytes=9 | bytes=9 needs --config.echo.where=device
echo.replay=x | replay='x' ... needs --config.echo.mode=adaptive
echo.mode=adaptive echo.replay=pattern:01 | must be 'pattern:', a 1 ... pattern:1000
echo.mode=adaptive echo.replay=pattern:1100000000001 | use items 6 times ... .cap=6
echo.mode=adaptive dispatch.steps=2 | steps=2 would decide adaptive draws too far ahead
dispatch.steps=0 | config.dispatch.steps=0 must be at least 1
D echo.lanes=24 | lanes=24 must divide config.batch_size=32; ... .echo.lanes=8
D echo.mode=adaptive echo.factor=2.0 | factor=2.0 belongs to mode fixed ... .echo.cap
D echo.mode=adaptive echo.order=spread | order='spread' belongs to mode fixed
D echo.mode=adaptive data.prefetch=0 | prefetch=0 reads when asked ... data.prefetch=4
data.pipeline=torch | config.data.pipeline='torch' ... grain, tf
data.pipeline=tfdata data.workers=2 | workers=2 needs data.pipeline=grain; ... --config
data.threads=-1 | config.data.threads=-1 is too small; use 0
data.storage.latency_s=-1.0 | data.storage.latency_s=-1.0 must be a finite number >= 0
echo.buffer=0 | echo.buffer must ... Use --config.echo.buffer=1.
echo.load.start=0.5 | start=0.5 needs --config.echo.mode=stoch
D echo.mode=stochastic echo.load.end=0.5 | schedule has end=0.5 other than start=1
D echo.mode=stochastic echo.load.start=0.0 | load.start=0.0 must be a prob
D echo.mode=stochastic echo.load.quantity=e echo.load.start=0.5 | an echo factor
mesh.data=0 | config.mesh.data=0 must be at least 1, or -1
optim.schedule=cosine optim.warmup_updates=60 | warmup_updates=60 must be below the 60
profile.updates=-1 | config.profile.updates=-1 must be at least 0
updates=30 profile.updates=5 profile.start=26 | start=26 ends after ... start=25
batch_size=10 mesh.data=2 mesh.fsdp=2 | must be a multiple of the 4 ... batch_size=12
D echo.factor=3.0 echo.order=spread mesh.data=1 | buffer=1 is too small for order
echo.factor=3.0 echo.order=spread | buffer=1 is too small for order
echo.facter=3 | has no field 'facter', did you mean 'factor'?; it has after, buffer,
ecko.factor=3 | config has no field 'ecko', did you mean 'echo'?
seed.x=3 | config.seed has no field 'x'; it has no fields
echo=3 | --config.echo is a group; set one of its fields: after
seed=1.5 | --config.seed=1.5: it takes a whole number, such as 10 or 1e3; it is 0
seed=2e-3 | --config.seed=2e-3: it takes a whole number
optim.lr=fast | lr=fast: it takes a number, such as 0.1 or 1e-3
echo.factor=auto | factor=auto: it takes a number
stop_at_target=2 | stop_at_target=2: it takes true or false
optim.boundaries=(5, | (5,: it takes values in parentheses
echo.factor | --config.echo.factor: it needs a value; it is 1.0
precision.compute=bf16 | compute='bf16' must be one of float32,
model.dtype=float32 | config.model has no field 'dtype'
workload=lmm | lmm
data.source=none.txt | none.txt
data.train_examples=15 | more than the 15 examples ... set --config.batch_size=8, or
"""


@pytest.mark.parametrize("row", REFUSED.strip().split("\n"))
def test_a_value_is_refused_with_its_field_and_the_fix(row, tmp_path, capsys):
    typed, parts = row.split(" | ")
    typed = typed.replace("D ", "echo.where=device echo.after=decode ")
    flags = [f"--config.{each}" for each in typed.split()]
    # The config's own value for an adaptive or stochastic echo would be refused, too.
    folder = tmp_path / "x"
    argv = ["train", "--config", "lm:tiny", "--workdir", str(folder), *flags]
    assert cli.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("echo-jax train: ")
    at = 0
    for part in parts.split("..."):
        assert part.strip() in line[at:], line
        at = line.index(part.strip(), at)
    # A corrected command must not find the folder taken.
    assert not folder.exists()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("updates=1e3", 1000),
        ("updates=1_000", 1000),
        ("data.threads=1e1", 10),
        ("model.vocab=300", 300),
        ("model.positions=sinusoidal", "sinusoidal"),
        ("echo.factor=3", 3.0),
        ("mesh.data=-1", -1),
        ("stop_at_target", True),
    ],
)
def test_every_field_is_a_flag(flag, value, tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(runs, "run_train", lambda *args, **_: trained.append(args))
    argv = ["train", "--config", "lm:tiny", "--workdir", f"{tmp_path}/x"]
    assert cli.main([*argv, "--config.target=1", f"--config.{flag}"]) == 0
    ((config, workdir),) = trained
    assert str(workdir) == f"{tmp_path}/x"
    assert config.updates == (1000 if "updates" in flag else 60)  # The variant's.
    for name in flag.partition("=")[0].split("."):
        config = config[name]
    assert config == value and type(config) is type(value)


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
    with pytest.raises(AttributeError, match=r"no field 'echo\.facto'; it has echo\.a"):
        load_config(str(own), {"echo.facto": 2.0})
    with pytest.raises(TypeError, match=r"config\.batch_size=1\.5 is no int"):
        load_config(str(own), {"batch_size": 1.5})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "defines no get_config"),
        ("def get_config(:\n", "line 1, fails: SyntaxError: invalid syntax"),
        ("\nimport nothing_there\n", "line 2, fails: ModuleNotFoundError: No module"),
        ("def get_config():\n  return {}['x']\n", "line 2, fails: KeyError: 'x'"),
        ("def get_config():\n  return 1\n", "returned 1; it has to return an ml_coll"),
        ("def get_config():\n  raise ValueError('mine')\n", "^mine$"),
        ("def get_config():\n  return int('x')\n", "line 2, fails: ValueError: inval"),
        ("import sys\ndef get_config():\n  sys.exit(3)\n", "line 3, fails: SystemExit"),
        ("def get_config(a, b):\n  pass\n", "own.py' needs a variant: give "),
        (MADE.format("c.updates = 'ten'"), "'updates' is of type int, which 'ten"),
        (MADE.format("c.update = 9"), "has no field 'update', did you mean 'updates'"),
        (MADE.format("c.echo.factr = 9"), "has no field 'factr', did you mean 'facto"),
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
    text = "from echo_jax.config import default_config as get_config"
    (tmp_path / "two.py").write_text(text)
    with pytest.raises(ValueError, match=r"two\.py' has no variants; leave :tiny out"):
        load_config(f"{tmp_path / 'two.py'}:tiny")


def test_a_config_without_a_field_is_refused():
    config = default_config()
    with config.unlocked():
        del config.echo.cap
    with pytest.raises(ValueError, match=r"no field 'echo\.cap'; let get_config"):
        check_config(config)


LOAD = {"schedule": "linear", "end": 0.25, "updates": 9}
KEPT = "from the last 1,024 of them on the"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "no echo: every batch is used once"),
        ({"factor": 2.0}, "every batch 2 times, after batch, in order consecutive"),
        (
            {"factor": 2.5, "after": "decode", "order": "spread"},
            "every example 2.5 times, after decode, in order spread, from 1,024 of",
        ),
        (
            {"mode": "adaptive", "after": "decode", "where": "device"},
            f"else an example again, each at most 4 times, {KEPT} device",
        ),
        (
            {"mode": "adaptive", "replay": "pattern:1000"},
            f"what is fresh at every 1 of 1000, else a batch again, each at most 4 "
            f"times, {KEPT} host",
        ),
        ({"mode": "stochastic", "load": LOAD}, "(linear, p from 1 to 0.25), else bat"),
    ],
)
def test_an_echo_is_described_in_a_sentence(fields, says):
    config = default_config()
    config.echo.buffer = 1024
    override(config, {"echo": fields})
    assert says in describe_echo(config)


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
        c.echo.factor, c.echo.order, c.echo.buffer = 2.0, "shuffle", 64
        c.echo.after, c.echo.where, c.echo.lanes = "decode", "device", 2
        c.dispatch.steps = 4
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
    if variant == "unfit":
        c.echo.lanes = 2
    if variant == "target":
        c.target, c.stop_at_target = 0.5, True
""")
FIXED = {"echo.factor": 1.0, "echo.order": "consecutive"}
ONECYCLE = {"optim.clip_norm": 0.0, "optim.warmup_updates": 0}
ONECYCLE |= {"optim.start_fraction": 0.04}
HALF = {"echo.load.start": 0.5, "echo.load.end": 0.5}


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


@pytest.mark.parametrize(
    ("variant", "typed", "left_out"),
    [
        ("", {"optim.name": "lars"}, {"optim.clip_norm": 0.0}),
        ("", {"optim.name": "optax.lion"}, {"optim.weight_decay": 0.0}),
        ("", {"optim.name": "lars", "optim.schedule": "onecycle"}, ONECYCLE),
        (
            "",
            {"optim.schedule": "cyclic", "optim.start_fraction": 0.1},
            {"optim.warmup_updates": 0},
        ),
        ("optax", {"optim.name": "sgd"}, {"optim.args": "{}"}),
        ("optax", {"optim.name": "optax.adafactor"}, {"optim.args": "{}"}),
        ("optax", {"optim.schedule": "cosine"}, {"optim.schedule_args": "{}"}),
        ("piecewise", {"optim.schedule": "linear"}, {"optim.boundaries": ()}),
        ("echoed", {"echo.mode": "adaptive"}, FIXED | {"dispatch.steps": 1}),
        ("echoed", {"echo.mode": "stochastic"} | HALF, FIXED),
        ("echoed", {"echo.where": "host"}, {"echo.lanes": 0}),
        ("echoed", {"local.schedule": "every"}, {"dispatch.steps": 1}),
        ("stochastic", {"echo.mode": "fixed"}, dict.fromkeys(HALF, 1.0)),
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


@pytest.mark.parametrize(
    ("variant", "typed", "message"),
    [
        ("", {"optim.name": "lars", "optim.clip_norm": 1.0}, "clip_norm=1.0 has no"),
        ("optax", {"optim.weight_decay": 0.1}, "optim.weight_decay=0.1 belongs to"),
        ("adaptive", {"echo": {"factor": 2.0}}, "echo.factor=2.0 belongs to mode"),
        ("unfit", {"updates": 5}, "lanes=2 needs"),  # Not because of what was typed.
        (
            "",
            {"optim.schedule": "onecycle", "optim.start_fraction": 0.0},
            "optim.start_fraction=0.0 must be above 0",
        ),
    ],
)
def test_a_typed_value_that_does_not_apply_is_refused(own, variant, typed, message):
    with pytest.raises(ValueError, match=message):
        check_config(load_config(f"{own}:{variant}", typed))


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
    fields = ("optim.name=lars", "optim.clip_norm=1", "optim.schedule=onecycle")
    cli.main([*argv, *(f"--config.{base}{each}" for each in fields)])
    notes = capsys.readouterr().err
    assert notes.count(f"config.{base}optim.warmup_updates=") == 1
    assert "clip_norm" not in notes
    config = caught[0].base if base else caught[0]
    assert (config.optim.warmup_updates, config.optim.clip_norm) == (0, 1.0)
