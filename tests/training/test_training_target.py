"""Devices that are not here: their names, what is missing for them, their programs."""

import importlib.util
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_workload import NUM_FEATURES, Regression, make_workload, tiny_config

from echo_jax.training.processes.sharding import batch_sharding, make_mesh
from echo_jax.training.xla import target as target_module
from echo_jax.training.xla.flops import program_flops
from echo_jax.training.xla.hlo import operations
from echo_jax.training.xla.options import xla_options
from echo_jax.training.xla.program import describe_update, lower_update
from echo_jax.training.xla.target import MissingCompilerError, make_target

NUM_PARAMS = 96
SHAPES = {"x": (NUM_FEATURES,), "y": ()}
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
def test_the_operations_of_a_program_are_those_of_any_device(name):
    config = tiny_config(mesh__data=-1)
    workload = make_workload(config)
    sample = {
        **{k: np.zeros((8, *shape), np.float32) for k, shape in SHAPES.items()},
        "repeat": np.zeros(8, np.int32),
    }
    counts = [
        program_flops(
            lower_update(config, workload, sample, make_mesh(-1, 1, 8, devices=devices))
        )
        for devices in (jax.devices()[:4], make_target(name).devices)
    ]
    # Random bits are made in another way there.
    assert counts[0] == pytest.approx(counts[1], rel=0.01)


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


@dataclass(frozen=True)
class Half(Regression):
    """Computes in bfloat16, all but the loss."""

    def loss(self, variables, batch, key):
        params = jax.tree.map(jnp.bfloat16, variables["params"])
        hidden = self._hidden(params, jnp.bfloat16(batch["x"]))
        found = jnp.float32(hidden @ params["second"])[:, 0]
        others = {"batch_stats": variables["batch_stats"]}
        return (found - batch["y"]) ** 2, others, {}


@pytest.mark.parametrize("name", TARGETS[:1])
@pytest.mark.parametrize(
    ("reduce", "in_bfloat16"),
    [
        # XLA sums a gradient in the type that it is computed in.
        ("auto", NUM_PARAMS),
        ("bfloat16", NUM_PARAMS),
        ("float32", 0),
    ],
)
def test_gradients_are_summed_there_in_the_type_that_is_asked_for(
    name, reduce, in_bfloat16
):
    config = tiny_config(mesh__data=-1, precision__reduce=reduce)
    workload = make_workload(config, task=Half())
    (reduces,) = describe_update(config, workload, make_target(name)).collectives
    assert reduces.kind == "all-reduce"
    assert reduces.numbers.get("bf16", 0) == in_bfloat16
    # The others are the losses and the counts of eight buckets, and statistics.
    assert 16 <= sum(reduces.numbers.values()) - NUM_PARAMS <= 32


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS[:1])
def test_all_reduces_run_there_beside_products_where_an_overlap_is_asked_for(name):
    target, rows, width = make_target(name), 4096, 1024
    mesh = make_mesh(4, 1, rows, devices=target.devices)
    # Of 8 MB each: what is summed together with others does not run beside products.
    shapes = [(width, 2 * width), (2 * width, width), (width, 2 * width)]
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)

    def loss(params, x):
        for matrix in params:
            x = jnp.tanh(x @ matrix)
        return x.sum()

    kind = mesh.devices.flat[0].device_kind
    config = tiny_config(xla__preset="overlap")
    options = dict(xla_options(config, "tpu", kind, absent=mesh))
    whole = NamedSharding(mesh, PartitionSpec())
    program = jax.jit(
        jax.grad(loss),
        in_shardings=(whole, batch_sharding(mesh)),
        out_shardings=whole,
        compiler_options=options,
    )
    text = target.compile(program.lower(params, x)).as_text()
    ((reduces,), _) = operations(text)
    # They have a start, products, and an end, and are counted once.
    assert reduces.between and min(reduces.between) >= 1
    assert reduces.numbers == {"f32": 6 * width**2}
