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
    f"echo_jax.{name}"
    for name in (
        "data.prepare.coco",
        *("data.prepare.images", "data.prepare.text", "data.sources.prepared"),
        *("data.sources.source", "inference.evaluate", "inference.export"),
        *("inference.run", "runs", "training.trainer", "training.xla.flops"),
        *("training.xla.options", "training.xla.profile"),
    )
}
# What users call, and extend.
DOORS = {
    f"echo_jax.echo.{name}"
    for name in (
        *("adapters.grain", "adapters.tfdata", "decision_log", "device", "echo"),
        *("finite", "instrument.probe", "instrument.worth", "keys", "laws"),
        *("laws.devices", "load_schedule", "spec"),
    )
}
# Whole networks, run one operation at a time.
SLOW = {f"echo_jax.models.{name}" for name in ("mobilenet", "resnet", "transformer")}
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
