"""Every workload trains alike on any mesh, its parameters split or not."""

import itertools
from contextlib import closing

import jax
import numpy as np
import pytest
from image_folders import prepare
from test_workload_cifar import SMALL
from test_workload_cifar import config_of as cifar_config
from test_workload_coco import config_of as coco_config
from test_workload_coco import folder as coco_folder  # noqa: F401
from test_workload_imagenet import SIZES
from test_workload_imagenet import config_of as imagenet_config

from echo_jax.config import load_config
from echo_jax.echo.spec import EchoSpec
from echo_jax.training.trainer import compile_functions
from echo_jax.workloads import build

BATCH = 16
TAGS = ("fresh_index", "repeat")


@pytest.fixture
def config_of(request, tmp_path):
    """Makes the config of a workload, on a little data."""

    def make(name, **fields):
        fields = {"batch_size": BATCH, **fields}
        if name == "cifar":
            return cifar_config(prepare(tmp_path, SMALL, SMALL[:8]), **fields)
        if name == "imagenet":
            return imagenet_config(prepare(tmp_path, SIZES, SIZES[:8]), **fields)
        if name == "coco":
            return coco_config(request.getfixturevalue("coco_folder"), **fields)
        named = {name.replace("__", "."): value for name, value in fields.items()}
        return load_config(f"configs/{name}.py:tiny", named)

    return make


def trained(config, batches, data, fsdp):
    """The losses of some updates, and how many devices split each parameter."""
    with config.unlocked():
        config.mesh.data, config.mesh.fsdp = data, fsdp
    compiled = compile_functions(config, build(config))
    state = compiled.init(compiled.init_key)
    losses = []
    for batch in batches:
        state, report = compiled.step_on_batch(state, batch)
        losses.append(float(jax.block_until_ready(report).window.loss.sum()))
    sizes = [
        x.size / x.addressable_shards[0].data.size
        for x in jax.tree.leaves(state.params)
    ]
    return losses, sizes


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("lm", {}),
        # Its rate is high enough to make rounding grow tenfold in four updates.
        ("shapes", {"optim.lr": 1e-3}),
        ("cifar", {}),
        ("imagenet", {"model__norm": "batch"}),
        ("imagenet", {"model__norm": "ghost"}),
        ("coco", {}),
    ],
    ids=["lm", "shapes", "cifar", "imagenet-batch", "imagenet-ghost", "coco"],
)
def test_any_mesh_trains_alike(config_of, name, fields):
    config = config_of(name, **fields)
    spec = EchoSpec(batch_size=BATCH)
    with closing(iter(build(config).train_dataset(spec))) as stream:
        batches = [*itertools.islice(stream, 4)]
    alone, _ = trained(config, batches, 1, 1)
    # Both axes; without the second one the same is seen of two workloads.
    for data, fsdp in ((2, 4), (8, 1))[: 2 if name in ("lm", "cifar") else 1]:
        losses, sizes = trained(config, batches, data, fsdp)
        np.testing.assert_allclose(losses, alone, rtol=1e-5)
        assert max(sizes) == fsdp


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
@pytest.mark.parametrize("name", ["lm", "cifar", "imagenet", "coco"])  # shapes: cifar's
def test_float16_trains_every_workload(config_of, name):
    def after_two(**precision):
        config = config_of(name, **{"batch_size": 8, "mesh__data": 1, **precision})
        with closing(iter(build(config).train_dataset(EchoSpec(batch_size=8)))) as data:
            batches = [*itertools.islice(data, 2)]
        compiled = compile_functions(config, build(config))
        state, losses = compiled.init(compiled.init_key), []
        for batch in batches:
            state, report = compiled.step_on_batch(state, batch)
            losses.append(float(report.window.loss.sum()))
        task, key = build(config).task, jax.random.key(0)
        items = {k: x for k, x in batches[0].items() if k not in TAGS}
        computed = jax.make_jaxpr(task.loss)(task.init(key), items, key)
        return losses, jax.device_get(state), "f16[" in str(computed)

    half = {"precision__compute": "float16", "precision__loss_scale": "static"}
    losses, state, is_half = after_two(**half, precision__init=64.0)
    expected, _, is_plain_half = after_two()
    assert is_half and not is_plain_half
    assert int(state.loss_scale.skipped_updates) == 0
    np.testing.assert_allclose(losses, expected, rtol=0.02)
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
