"""Devices that are not here: their names, what is missing for them, their programs."""

import importlib.util

import pytest
from tiny_workload import make_workload, tiny_config

from echo_jax.training import target as target_module
from echo_jax.training.program import describe_update
from echo_jax.training.sharding import make_mesh
from echo_jax.training.target import MissingCompilerError, make_target

SPREAD = {"echo__order": "spread", "echo__factor": 2.0, "echo__buffer": 4000}


@pytest.mark.parametrize(
    "name", ["", "v5e", "v5e:", "v5e:2x2\n", "V5E:2x2", "h100", "h100x0", "v9:2x2"]
)
def test_a_name_that_is_no_target_is_answered_by_those_that_are(name):
    with pytest.raises(ValueError, match=r"is no target; use v4, v5e, .* h100x4"):
        make_target(name)


@pytest.mark.parametrize(
    ("name", "package"), [("v5e:2x2", "libtpu"), ("h100x4", "jax-cuda12-plugin")]
)
@pytest.mark.parametrize("error", [None, ModuleNotFoundError])
def test_a_compiler_that_is_not_installed_is_named_with_its_extra(
    name, package, error, monkeypatch
):
    def find_spec(module):
        if error:
            raise error(module)

    monkeypatch.setattr(target_module.importlib.util, "find_spec", find_spec)
    with pytest.raises(
        MissingCompilerError, match=rf"{name} needs {package}, .*'echo-jax\[aot\]'"
    ):
        make_target(name)


def _installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


TARGETS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not _installed(module), reason=f"{name} needs {module}, of the extra aot"
        ),
    )
    for name, module in (
        ("v5e:2x2", "libtpu"),
        ("h100x4", "jax_plugins.xla_cuda12"),
    )
]


@pytest.mark.parametrize("name", TARGETS)
def test_an_update_compiles_for_devices_that_are_not_here(name):
    fields = {"echo__where": "device", "echo__after": "decode", "mesh__data": -1}
    config = tiny_config(**fields, **SPREAD)
    found = describe_update(config, make_workload(config), make_target(name))
    assert found.num_devices == 4 and found.kind != "cpu"
    (reduces,) = found.collectives
    assert reduces.kind == "all-reduce"
    assert found.gradient_bytes / 4 <= reduces.numbers["f32"]
    assert found.rewritten_bytes >= found.buffer_bytes
    assert found.write_temporary_bytes < found.buffer_bytes
    assert found.host_transfers == 0


@pytest.mark.parametrize("name", TARGETS)
def test_the_mesh_of_a_config_has_to_fit_the_target(name):
    devices = make_target(name).devices
    assert dict(make_mesh(2, 2, 8, devices=devices).shape) == {"data": 2, "fsdp": 2}
    with pytest.raises(ValueError, match="does not fit 4 devices"):
        make_mesh(8, 1, 8, devices=devices)


@pytest.mark.parametrize("name", TARGETS)
def test_an_option_that_the_target_does_not_know_is_refused(name):
    config = tiny_config(mesh__data=-1, xla__options='{"nonsense": 1}')
    with pytest.raises(ValueError, match=r"cannot compile for (gpu|tpu) .*'nonsense'"):
        describe_update(config, make_workload(config), make_target(name))
