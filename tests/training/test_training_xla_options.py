"""Options of XLA reach the compiled update, and what is unknown is refused."""

import json

import jax
import pytest
from tiny_workload import compiled_update, make_workload, run, tiny_config

from echo_jax.config.check import check_config
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.trainer import compile_functions
from echo_jax.training.xla import options as xla_options_module
from echo_jax.training.xla.options import xla_options

KNOWN = {"xla_cpu_enable_fast_min_max": True}


def test_options_are_recorded_and_change_no_result(tmp_path):
    plain = run(tmp_path / "plain")
    asked = run(tmp_path / "asked", xla__options=json.dumps(KNOWN))
    assert asked["params_sha256"] == plain["params_sha256"]
    for name, options in (("plain", {}), ("asked", KNOWN)):
        written = json.loads((tmp_path / name / "environment.json").read_text())
        assert written["xla_options"] == options


def test_they_are_those_of_the_compiled_update():
    config = tiny_config(xla__options=json.dumps(KNOWN))
    compiled = compile_functions(config, make_workload(config))
    assert isinstance(compiled, CompiledFunctions)
    assert dict(compiled.xla_options) == KNOWN
    other = compile_functions(tiny_config(), make_workload(config))
    assert other.xla_options == () and other._shared is not compiled._shared
    same = compile_functions(config, make_workload(config))
    assert same._shared is compiled._shared


def test_the_update_is_compiled_with_them(monkeypatch):
    monkeypatch.setattr(xla_options_module, "_try", lambda *args: None)
    config = tiny_config(xla__options='{"nonsense": 1}')
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"compile option: 'nonsense'"):
        compiled_update(config)


def test_an_option_that_xla_does_not_know_is_refused_before_anything_is_written(
    tmp_path,
):
    with pytest.raises(ValueError, match=r"cannot compile for cpu .*'nonsense'.*leave"):
        run(tmp_path / "run", xla__options='{"nonsense": 1}')
    assert not [*tmp_path.rglob("*.json*")]


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_presets_say_how_much_is_reduced_together(platform):
    def options(preset, **more):
        config = tiny_config(xla__preset=preset, xla__options=json.dumps(more))
        check_config(config)
        return dict(xla_options(config, platform))

    def together(preset):
        found = options(preset).items()
        return next(value for name, value in found if "threshold" in name)

    assert options("default") == {}
    assert together("fuse") > together("overlap") > together("serial") == 0
    # What is said by hand comes after.
    name = next(iter(options("fuse")))
    assert options("fuse", **{name: 7}) == {name: 7}


def test_what_a_kind_of_devices_takes_is_of_that_kind_alone():
    def options(preset, kind):
        return dict(xla_options(tiny_config(xla__preset=preset), "tpu", kind))

    plain = options("overlap", "TPU v6 lite")
    more = options("overlap", "TPU v5 lite")
    assert plain.items() < more.items() and more["xla_enable_async_all_reduce"] is True
    assert options("serial", "TPU v5 lite") == options("serial", "TPU v6 lite")


def test_on_cpus_presets_have_no_options():
    for preset in ("default", "fuse", "overlap", "serial"):
        assert xla_options(tiny_config(xla__preset=preset), "cpu") == ()
    with pytest.raises(ValueError, match="preset='all' must be one of default, fuse"):
        check_config(tiny_config(xla__preset="all"))
    with pytest.raises(ValueError, match=r"config.xla.options='1' is no JSON object"):
        xla_options(tiny_config(xla__options="1"), "cpu")
