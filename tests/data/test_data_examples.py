"""The examples in docstrings of the data code and the workloads are run."""

import doctest
import os
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest

from echo_jax import workloads
from echo_jax.config import load_config
from echo_jax.data import evaluation, images, pipeline, shapes, storage, text
from echo_jax.workloads import lm
from echo_jax.workloads import shapes as shapes_workload

MODULES = [
    evaluation,
    images,
    lm,
    pipeline,
    shapes,
    shapes_workload,
    storage,
    text,
    workloads,
]
# What a reader of an example is expected to have imported.
NAMES = {
    "closing": closing,
    "decode_window": text.decode_window,
    "jax": jax,
    "jnp": jax.numpy,
    "load_config": load_config,
    "np": np,
}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_are_true(module, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = finder.find(module, extraglobs=NAMES)
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.tries > 0
    assert runner.failures == 0, os.linesep.join(test.name for test in tests)
