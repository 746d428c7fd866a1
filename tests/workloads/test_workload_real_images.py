"""The tiny classification configs learn from real images, as their configs say."""

import os
from pathlib import Path

import pytest

from echo_jax.config import load_config
from echo_jax.data.prepare.images import prepare_images
from echo_jax.data.prepare.job import Settings
from echo_jax.runs import run_train

CONFIGS = Path(__file__).parents[2] / "configs"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "ECHO_JAX_DATA" not in os.environ,
        reason="ECHO_JAX_DATA names no folder of real data",
    ),
]


def train(tmp_path, name, sources, **overrides):
    data = Path(os.environ["ECHO_JAX_DATA"])
    prepared = tmp_path / "prepared"
    prepare_images(
        [f"{split}={data / file}" for split, file in sources.items()],
        Settings(out=prepared),
    )
    fields = {name.replace("__", "."): value for name, value in overrides.items()}
    fields |= {"data.source": str(prepared), "mesh.data": 1}
    config = load_config(f"{CONFIGS / name}", fields)
    return run_train(config, tmp_path / "run")["final"]


def test_cifar_10_is_learned(tmp_path):
    sources = {"train": "cifar10/train.tar.gz", "validation": "cifar10/test.tar.gz"}
    final = train(
        tmp_path, "cifar.py:tiny", sources, updates=200, eval_every=200,
        data__eval_examples=1000,
    )  # fmt: skip
    # By chance 0.1. It got 0.44; the whole config, of 800 updates, gets 0.60.
    assert final["accuracy"] > 0.35


def test_64_photographs_are_learned_by_heart(tmp_path):
    sources = {"train": "imagenet_sample/images.tar"}
    final = train(tmp_path, "imagenet.py:tiny", sources, updates=60, eval_every=60)
    # By chance 0.002: there are 500 classes.
    assert final["accuracy"] > 0.98 and final["top_5"] == 1
