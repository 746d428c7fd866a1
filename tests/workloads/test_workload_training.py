"""All workloads train: on any mesh alike, in half precision, with every echo."""

import functools
import itertools
import os
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest
from compilations import counted_compilations
from test_workload_coco import config_of as coco_config
from test_workload_coco import folder as coco_folder  # noqa: F401

import echo_jax as ej
from echo_jax.config import (
    RunSpec,
    check_config,
    import_config,
    load_config,
    packaged_configs,
)
from echo_jax.data.prepare import Settings, prepare_images
from echo_jax.runs import run_train
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.workloads import build

VARIANTS = import_config(packaged_configs()["cifar"]).ECHO_VARIANTS


@pytest.fixture
def make(request):
    """Makes the config of a workload, on a little data."""

    def make(name, **fields):
        if name == "coco":
            return coco_config(request.getfixturevalue("coco_folder"), **fields)
        named = {name.replace("__", "."): value for name, value in fields.items()}
        return load_config(f"{name}:tiny", named)

    return functools.partial(make, batch_size=16)


def batches_of(config, count):
    spec = ej.EchoSpec(batch_size=config.batch_size)
    with closing(iter(build(config).train_dataset(spec))) as stream:
        return [*itertools.islice(stream, count)]


def trained(config, batches):
    """The losses of some updates, the programs compiled up to each, and the state."""
    # Another test may have compiled the programs of an equal task.
    jax.clear_caches()
    functions = CompiledFunctions(RunSpec.of(config), build(config))
    state, losses, counts = functions.init(functions.init_key), [], []
    with counted_compilations() as compiled:
        for batch in batches:
            state, report = functions.step_on_batch(state, batch)
            losses.append(float(jax.block_until_ready(report).window.loss.sum()))
            counts.append(len(compiled))
    return losses, counts, state


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("lm", {}),
        # Its rate is high enough to make rounding grow tenfold in four updates.
        ("shapes", {"optim__lr": 1e-3}),
        ("coco", {"model__stage_sizes": (1, 1, 1)}),
    ],
    ids=["lm", "shapes", "coco"],
)
def test_any_mesh_trains_alike_and_compiles_no_more_after_two_updates(
    make, name, fields
):
    batches = batches_of(make(name, **fields), 4)
    alone, counts, _ = trained(make(name, **fields, mesh__data=1), batches)
    assert 0 < counts[0] <= counts[1] == counts[2] == counts[3]
    mesh = {"mesh__data": 2, "mesh__fsdp": 4}
    losses, counts, state = trained(make(name, **fields, **mesh), batches)
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
    assert counts[1] == counts[3]
    arrays = jax.tree.leaves(state.params)
    assert max(x.size / x.addressable_shards[0].data.size for x in arrays) == 4


@pytest.mark.parametrize("file", ["cifar", "imagenet"])
def test_a_variant_sets_the_echo_alone(file):
    plain = load_config(f"{file}:tiny").to_dict()
    for variant, fields in VARIANTS.items():
        config = load_config(f"{file}:tiny,{variant}")
        check_config(config)
        changed = {**plain, "echo": {**plain["echo"], **fields}}
        assert config.to_dict() == changed, variant
    with pytest.raises(ValueError, match=r"'evrey' is unknown; use tiny, .*baseline, "):
        load_config(f"{file}:tiny,evrey")


@pytest.mark.slow
@pytest.mark.skipif("ECHO_JAX_DATA" not in os.environ, reason="needs ECHO_JAX_DATA")
@pytest.mark.parametrize(
    ("name", "archive", "holdout", "fields", "least"),
    [
        # By chance 0.1. The whole config gets 0.60.
        (
            "cifar",
            "cifar10/test.tar.gz",
            0.1,
            {"updates": 80, "batch_size": 32, "optim.warmup_updates": 10},
            0.2,
        ),
        # By chance 0.002: there are 500 classes, of 32 photographs.
        (
            "imagenet",
            "imagenet_sample/images.tar",
            0.0,
            {"updates": 40, "data.train_examples": 32}
            | {"data.image_size": 32, "data.resize": 36},
            0.9,
        ),
    ],
    ids=["cifar", "imagenet"],
)
def test_real_images_are_learned(tmp_path, name, archive, holdout, fields, least):
    data = Path(os.environ["ECHO_JAX_DATA"]) / archive
    prepare_images([str(data)], Settings(out=tmp_path / "prepared", holdout=holdout))
    fields |= {"data.source": str(tmp_path / "prepared"), "mesh.data": 1}
    fields |= {"eval_every": fields["updates"], "data.eval_examples": 0}
    config = load_config(f"{name}:tiny", fields)
    assert run_train(config, tmp_path / "run")["final"]["accuracy"] > least
