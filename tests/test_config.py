import pytest

from echo_jax.config import check_config, default_config, load_config


def config_with(**fields):
    config = default_config()
    config.update_from_flattened_dict(
        {name.replace("__", "."): value for name, value in fields.items()}
    )
    return config


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
        ({"echo__factor": 0.5}, r"config\.echo\.factor=0\.5 must be at least 1\.0"),
        ({"echo__factor": float("nan")}, r"config\.echo\.factor=nan must be"),
        ({"echo__factor": float("inf")}, r"config\.echo\.factor=inf must be"),
        ({"echo__order": "random"}, r"config\.echo\.order='random' must be one of con"),
        ({"echo__after": "crop"}, r"config\.echo\.after='crop' must be one of read, "),
        ({"optim__lr": 0.0}, r"config\.optim\.lr=0\.0 must be above 0"),
        ({"optim__momentum": 1.0}, r"config\.optim\.momentum=1\.0 must be below 1"),
        ({"optim__end_fraction": 1.5}, r"end_fraction=1\.5 must be at most 1"),
        ({"target": float("nan")}, r"config\.target=nan must be finite"),
        ({"stop_at_target": True}, r"config\.stop_at_target=True needs a target"),
        ({"mesh__data": 0}, r"config\.mesh\.data=0 must be at least 1, or -1"),
        (
            {"optim__schedule": "cosine", "optim__warmup_updates": 1000},
            r"warmup_updates=1000 must be below the 1000 updates",
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
    with pytest.raises(TypeError):
        load_config(str(config_file), {"batch_size": 1.5})


def test_a_missing_file_or_function_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'nowhere\.py' is no file"):
        load_config("nowhere.py:tiny")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(AttributeError, match=r"defines no get_config"):
        load_config(str(tmp_path / "empty.py"))
