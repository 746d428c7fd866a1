"""The examples in docstrings of data code, models and workloads are run."""

import doctest
import os
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest

from echo_jax import workloads
from echo_jax.config import load_config
from echo_jax.data.detection import anchors, boxes
from echo_jax.data.images import decode, host_augment, host_colour
from echo_jax.data.pipeline import dataset, evaluation, spec, storage
from echo_jax.data.prepare import (
    blocks,
    class_lists,
    documents,
    errors,
    job,
    parallel,
    tokenizer,
)
from echo_jax.data.sources import shapes, text
from echo_jax.models import batch_norm, imagenet_resnet, resnet, ssd, transformer
from echo_jax.terminal import countdown
from echo_jax.workloads import coco, lm, pixels

MODULES = [
    anchors,
    batch_norm,
    blocks,
    boxes,
    class_lists,
    coco,
    countdown,
    dataset,
    decode,
    documents,
    errors,
    evaluation,
    host_augment,
    host_colour,
    imagenet_resnet,
    job,
    lm,
    parallel,
    pixels,
    resnet,
    shapes,
    spec,
    ssd,
    storage,
    text,
    tokenizer,
    transformer,
    workloads,
]
# What a reader of an example is expected to have imported.
NAMES = {
    "Path": Path,
    "closing": closing,
    "decode_window": text.decode_window,
    "jax": jax,
    "jnp": jax.numpy,
    "load_config": load_config,
    "np": np,
}


# Whole networks, run one operation at a time.
SLOW = {resnet, transformer}


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(module, marks=[pytest.mark.slow] if module in SLOW else [])
        for module in MODULES
    ],
    ids=lambda module: module.__name__,
)
def test_examples_are_true(module, monkeypatch, tmp_path):
    (tmp_path / "configs").symlink_to(Path(__file__).parents[2] / "configs")
    monkeypatch.chdir(tmp_path)
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = finder.find(module, extraglobs=NAMES)
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.tries > 0
    assert runner.failures == 0, os.linesep.join(test.name for test in tests)
