import copy
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from echo_jax.config import default_config, load_config, override
from echo_jax.config.check import check_config
from echo_jax.config.echo import describe_echo


def config_with(**fields):
    config = default_config()
    config.update_from_flattened_dict(
        {name.replace("__", "."): value for name, value in fields.items()}
    )
    return config


ON_DEVICE = {"echo__where": "device", "echo__after": "decode"}
STOCHASTIC_LOAD = {
    "echo.mode": "stochastic",
    "echo.load": {"schedule": "linear", "end": 0.25, "updates": 9},
}
STOCHASTIC = {**ON_DEVICE, "echo__mode": "stochastic"}


def test_defaults_are_valid_and_locked():
    config = default_config()
    check_config(config)
    with pytest.raises(AttributeError):
        config.batchsize = 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 0}, r"config\.batch_size=0 must be at least 1; set --config"),
        ({"updates": 0}, r"config\.updates=0 must be at least 1"),
        ({"seed": -1}, r"config\.seed=-1 must be at least 0"),
        ({"seed": 2**32}, r"config\.seed=4294967296 must be below 4294967296"),
        ({"echo__factor": 0.5}, r"config\.echo: echo factor 0\.5 is outside \[1"),
        ({"echo__factor": float("nan")}, r"config\.echo: echo factor nan is not"),
        ({"echo__factor": float("inf")}, r"config\.echo: echo factor inf is not"),
        ({"echo__order": "random"}, r"config\.echo\.order='random' is unknown; use"),
        ({"echo__after": "crop"}, r"config\.echo\.after='crop' .* one of read, "),
        ({"optim__lr": 0.0}, r"config\.optim\.lr=0\.0 must be above 0"),
        (
            {"optim__schedule": "piecewise"},
            r"boundaries=\(\) must be rising numbers of updates above the 0 of the wa",
        ),
        (
            {"optim__schedule": "piecewise", "optim__boundaries": (5, 5)},
            r"boundaries=\(5, 5\) must be rising",
        ),
        (
            {"optim__schedule": "piecewise", "optim__boundaries": (5, "9")},
            r"boundaries=\(5, '9'\) must be rising numbers of updates",
        ),
        (
            {"optim__schedule": "piecewise", "optim__boundaries": (5, 9.5)},
            r"boundaries=\(5, 9\.5\) must be rising numbers of updates",
        ),
        (
            {
                "optim__schedule": "piecewise",
                "optim__boundaries": (5, 9),
                "optim__warmup_updates": 5,
            },
            r"boundaries=\(5, 9\) must be rising numbers of updates above the 5 of",
        ),
        (
            {"optim__boundaries": (5,)},
            r"boundaries=\(5,\) needs --config\.optim\.schedule=piecewise",
        ),
        ({"optim__momentum": 1.0}, r"config\.optim\.momentum=1\.0 must be below 1"),
        ({"optim__end_fraction": 1.5}, r"end_fraction=1\.5 must be at most 1"),
        ({"target": float("nan")}, r"config\.target=nan must be finite"),
        ({"stop_at_target": True}, r"config\.stop_at_target=True needs a target"),
        ({"echo__cap": 0}, r"config\.echo\.cap=0 must be at least 1"),
        ({"echo__where": "tpu"}, r"config\.echo\.where='tpu' must be one of host, dev"),
        (
            {"echo__where": "device", "echo__after": "batch"},
            r"after='batch' goes with echo\.where=host; .*\.echo\.after=decode",
        ),
        ({"echo__lanes": 2}, r"lanes=2 needs --config\.echo\.where=device"),
        ({"echo__buffer_bytes": 9}, r"bytes=9 needs --config\.echo\.where=device"),
        ({"echo__replay": "x"}, r"replay='x' .* needs --config\.echo\.mode=adaptive"),
        (
            {"echo__mode": "adaptive", "echo__replay": "pattern:01"},
            r"replay='pattern:01' must be 'pattern:', a 1 .*\.replay=pattern:1000",
        ),
        (
            {"echo__mode": "adaptive", "echo__replay": "pattern:1100000000001"},
            r"use items 6 times, more than config\.echo\.cap=4; .*\.cap=6",
        ),
        (
            {**ON_DEVICE, "echo__lanes": 24},
            r"lanes=24 must divide config\.batch_size=32; set --config\.echo\.lanes=8",
        ),
        (
            {**ON_DEVICE, "echo__mode": "adaptive", "echo__factor": 2.0},
            r"factor=2\.0 belongs to mode fixed; .* goes by config\.echo\.cap",
        ),
        (
            {**ON_DEVICE, "echo__mode": "stochastic", "echo__factor": "auto"},
            r"factor='auto' belongs to mode fixed; .* config\.echo\.load",
        ),
        (
            {**ON_DEVICE, "echo__mode": "adaptive", "echo__order": "spread"},
            r"order='spread' belongs to mode fixed",
        ),
        (
            {**ON_DEVICE, "echo__mode": "adaptive", "dispatch__mode": "scan"},
            r"mode='scan' would decide adaptive draws too far ahead",
        ),
        (
            {**ON_DEVICE, "echo__mode": "adaptive", "data__prefetch": 0},
            r"prefetch=0 reads when asked, .* set --config\.data\.prefetch=4",
        ),
        (
            {"data__pipeline": "torch"},
            r"config\.data\.pipeline='torch' .* grain, tf",
        ),
        (
            {"data__pipeline": "tfdata", "data__workers": 2},
            r"config\.data\.workers=2 needs data\.pipeline=grain; .* Use --config",
        ),
        (
            {"data__threads": "auto", "data__workers": 2},
            r"config\.data\.threads='auto' is measured without workers, and data\.wo",
        ),
        (
            {"data__threads": -1},
            r"config\.data\.threads=-1 is too small; use 0",
        ),
        (
            {"data__storage__latency_s": -1.0},
            r"config\.data\.storage\.latency_s=-1\.0 must be a finite number >= 0",
        ),
        ({"echo__buffer": 0}, r"echo\.buffer must .* Use --config\.echo\.buffer=1\."),
        ({"echo__load__start": 0.5}, r"start=0\.5 needs --config\.echo\.mode=stoch"),
        (
            {**STOCHASTIC, "echo__load__end": 0.5},
            r"config\.echo\.load: a constant schedule has end=0\.5 other than start=1",
        ),
        (
            {**STOCHASTIC, "echo__load__start": 0.0},
            r"load\.start=0\.0 must be a prob",
        ),
        (
            {**STOCHASTIC, "echo__load__quantity": "e", "echo__load__start": 0.5},
            r"config\.echo\.load\.start=0\.5 must be an echo factor, at least 1",
        ),
        ({"dispatch__mode": "scam"}, r"mode='scam' must be one of auto, loop"),
        (
            {"dispatch__mode": "loop", "dispatch__steps": 4},
            r"steps=4 needs another dispatch\.mode than loop",
        ),
        ({"mesh__data": 0}, r"config\.mesh\.data=0 must be at least 1, or -1"),
        (
            {"optim__schedule": "cosine", "optim__warmup_updates": 1000},
            r"warmup_updates=1000 must be below the 1000 updates",
        ),
        ({"profile__updates": -1}, r"config\.profile\.updates=-1 must be at least 0"),
        (
            {"updates": 30, "profile__updates": 5, "profile__start": 26},
            r"start=26 ends after the 30 updates of the run; .*profile\.start=25",
        ),
        (
            {"batch_size": 10, "mesh__data": 2, "mesh__fsdp": 2},
            r"batch_size=10 must be a multiple of the 4 .* --config\.batch_size=12",
        ),
    ],
)
def test_refuses_with_field_value_and_fix(fields, message):
    with pytest.raises(ValueError, match=message):
        check_config(config_with(**fields))


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "experiment.py"
    path.write_text(
        "from echo_jax.config import default_config\n"
        "def get_config(variant='full'):\n"
        "    config = default_config()\n"
        "    config.updates = {'full': 500, 'tiny': 5}[variant]\n"
        "    return config\n"
    )
    return path


def test_loads_a_variant_with_overrides_and_locks(config_file):
    assert load_config(str(config_file)).updates == 500
    config = load_config(
        f"{config_file}:tiny",
        {"echo": {"factor": 2.0}, "optim.lr": 1, "data": {"storage.latency_s": 0.5}},
    )
    assert config.updates == 5
    assert config.echo.factor == 2.0
    assert config.echo.order == "consecutive"
    assert config.optim.lr == 1.0
    assert config.data.storage.latency_s == 0.5
    assert config.is_locked


def test_an_override_of_an_unknown_field_or_another_type_is_refused(config_file):
    with pytest.raises(
        AttributeError, match=r"no field 'echo\.facto'; it has echo\.af"
    ):
        load_config(str(config_file), {"echo.facto": 2.0})
    with pytest.raises(TypeError, match=r"config\.batch_size=1\.5 is no int, and the"):
        load_config(str(config_file), {"batch_size": 1.5})


def test_a_missing_file_or_function_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'nowhere\.py' is not a file"):
        load_config("nowhere.py:tiny")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(AttributeError, match=r"defines no get_config"):
        load_config(str(tmp_path / "empty.py"))


MADE = """
from echo_jax.config import default_config
def get_config():
    c = default_config()
    {}
    return c
"""


def test_a_variant_of_a_config_without_any_is_refused(tmp_path):
    (tmp_path / "own.py").write_text(MADE.format("pass"))
    with pytest.raises(ValueError, match=r"own\.py' has no variants; leave :tiny out"):
        load_config(f"{tmp_path / 'own.py'}:tiny")


def test_a_failure_is_found_in_a_file_that_is_named_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("\n1 / 0\n")
    with pytest.raises(ValueError, match=r"^config 'own\.py', line 2, fails: Zero"):
        load_config("own.py")


def test_a_config_of_other_fields_is_refused():
    config = default_config()
    with config.unlocked():
        del config.echo.cap
    with pytest.raises(ValueError, match=r"no field 'echo\.cap'; let get_config"):
        check_config(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_config(:\n", "line 1, fails: SyntaxError: invalid syntax"),
        ("\nimport nothing_there\n", "line 2, fails: ModuleNotFoundError: No module"),
        ("def get_config():\n  return {}['x']\n", "line 2, fails: KeyError: 'x'"),
        ("def get_config():\n  return 1\n", "returned 1; it has to return an ml_coll"),
        ("def get_config():\n  raise ValueError('mine')\n", "^mine$"),
        ("def get_config():\n  return int('x')\n", "line 2, fails: ValueError: inval"),
        ("import sys\ndef get_config():\n  sys.exit(3)\n", "line 3, fails: SystemExit"),
        ("def get_config(a, b):\n  pass\n", "own.py' needs a variant: give "),
        (
            MADE.format("c.updates = 'ten'"),
            "field 'updates' is of type int, which 'ten",
        ),
        (MADE.format("c.update = 9"), "has no field 'update', did you mean 'updates'"),
        (MADE.format("c.echo.factr = 9"), "has no field 'factr', did you mean 'facto"),
    ],
)
def test_a_file_that_fails_is_named_with_its_line(tmp_path, text, message):
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(str(tmp_path / "own.py"))


def test_a_config_may_import_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_the_config.py").write_text("UPDATES = 7\n")
    (tmp_path / "one.py").write_text(
        "from beside_the_config import UPDATES\n"
        "from echo_jax.config import default_config\n"
        "def get_config():\n"
        "    config = default_config()\n"
        "    config.updates = UPDATES\n"
        "    return config\n"
    )
    before = list(sys.path)
    assert load_config(str(tmp_path / "one.py")).updates == 7
    (tmp_path / "two.py").write_text("import no_such_module\n")
    with pytest.raises(ValueError, match="ModuleNotFoundError"):
        load_config(str(tmp_path / "two.py"))
    assert sys.path == before


@pytest.mark.parametrize(("value", "kept"), [("auto", "auto"), (3, 3.0), (2.5, 2.5)])
def test_a_factor_is_a_number_or_auto(config_file, value, kept):
    config = load_config(str(config_file), {"echo.factor": value})
    check_config(config)
    assert config.echo.factor == kept and type(config.echo.factor) is type(kept)
    # Copies keep the type, and are set apart.
    copied = copy.deepcopy(config)
    copied.echo.factor = 7
    assert (copied.echo.factor, config.echo.factor) == (7.0, kept)
    assert config.to_dict()["echo"]["factor"] == kept


@pytest.mark.parametrize("value", ["automatic", "2.0", True, None, [2.0]])
def test_a_factor_is_nothing_else(config_file, value):
    with pytest.raises(TypeError, match=r"is no value .* a number, such as 1\.0, or"):
        load_config(str(config_file), {"echo.factor": value})


@pytest.mark.parametrize(
    ("text", "value"), [("auto", "auto"), ("3", 3.0), ("2.5", 2.5), ("1e1", 10.0)]
)
def test_a_factor_on_the_command_line(text, value):
    config = flagged(f"--config.echo.factor={text}")
    assert config.echo.factor == value and type(config.echo.factor) is type(value)


def test_a_factor_on_the_command_line_that_is_none():
    with pytest.raises(flags.IllegalFlagValueError, match="a number, or 'auto'"):
        flagged("--config.echo.factor=many")


def flagged(flag):
    config, values = default_config(), flags.FlagValues()
    config_flags.DEFINE_config_dict(
        "config", config, flag_values=values, sys_argv=["", flag]
    )
    values(["", flag])
    return config


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "no echo: every batch is used once"),
        (
            {"echo.factor": 2.0},
            "echo: every batch 2 times, after batch, in order consecutive",
        ),
        (
            {"echo.factor": 2.5, "echo.after": "decode", "echo.order": "spread"},
            "echo: every example 2.5 times, after decode, in order spread, from 1,024 "
            "of them on the host",
        ),
        (
            {"echo.factor": "auto", "echo.after": "augment", "echo.order": "shuffle"},
            "echo: every example as often as the loader needs, at most 4 times, after "
            "augment, in order shuffle, from 1,024 of them on the host",
        ),
        (
            {"echo.mode": "adaptive", "echo.after": "decode", "echo.where": "device"},
            "echo: after decode, what is fresh if it is ready, else an example again, "
            "each at most 4 times, from the last 1,024 of them on the device",
        ),
        (
            {"echo.mode": "adaptive", "echo.replay": "pattern:1000"},
            "echo: after batch, what is fresh at every 1 of 1000, else a batch again, "
            "each at most 4 times, from the last 1,024 of them on the host",
        ),
        (
            STOCHASTIC_LOAD,
            "echo: after batch, a coin says before each update whether fresh data is "
            "loaded (linear, p from 1 to 0.25), else batches of the last 1,024 of them "
            "on the host are used again",
        ),
    ],
)
def test_an_echo_is_said_in_a_sentence(fields, says):
    config = default_config()
    config.echo.buffer = 1024
    override(config, fields)
    assert describe_echo(config) == says
