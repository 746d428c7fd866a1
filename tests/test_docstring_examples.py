"""The examples in docstrings are true: modules that have some are run."""

import doctest
import importlib
import os
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest

from echo_jax.config import load_config

ROOT = Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.glob("echo_jax/**/*.py")
    if ">>> " in path.read_text(encoding="utf-8")
}
# Their examples name files, runs or devices of the reader.
SHOWN = {
    "echo_jax.data.prepare.coco",
    "echo_jax.data.prepare.images",
    "echo_jax.data.prepare.text",
    "echo_jax.data.sources.prepared",
    "echo_jax.data.sources.source",
    "echo_jax.inference.evaluate",
    "echo_jax.inference.export",
    "echo_jax.inference.run",
    "echo_jax.runs",
    "echo_jax.training.trainer",
}
# What users call, and extend.
DOORS = {
    "echo_jax.echo.adapters.grain",
    "echo_jax.echo.adapters.tfdata",
    "echo_jax.echo.decision_log",
    "echo_jax.echo.device",
    "echo_jax.echo.echo",
    "echo_jax.echo.finite",
    "echo_jax.echo.instrument.probe",
    "echo_jax.echo.instrument.worth",
    "echo_jax.echo.keys",
    "echo_jax.echo.laws",
    "echo_jax.echo.laws.devices",
    "echo_jax.echo.load_schedule",
    "echo_jax.echo.spec",
}
# Whole networks, run one operation at a time.
SLOW = {"echo_jax.models.resnet", "echo_jax.models.transformer"}
# What a reader of an example is expected to have imported.
NAMES = {
    "Path": Path,
    "closing": closing,
    "jax": jax,
    "jnp": jax.numpy,
    "load_config": load_config,
    "np": np,
}


def test_what_users_call_has_an_example():
    assert DOORS <= MODULES


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in sorted(MODULES - SHOWN)
    ],
)
def test_examples_are_true(name, monkeypatch, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    # By its full name: an attribute of its package may hide it, as a function does.
    module = importlib.import_module(name)
    tests = doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=NAMES)
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.tries > 0
    assert runner.failures == 0, os.linesep.join(test.name for test in tests)
