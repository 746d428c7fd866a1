"""The examples in the docstrings of the library are true."""

import doctest
import importlib
import pkgutil

import pytest

# `echo_jax.echo`, as an attribute, is the function.
PACKAGE = importlib.import_module("echo_jax.echo")
MODULES = sorted(module.name for module in pkgutil.iter_modules(PACKAGE.__path__))
# Modules whose public names are shown at work in another module's example.
WITHOUT_EXAMPLE = {
    "chunks",
    "counts",
    "device_feed",
    "laws",
    "orders",
    "plan",
    "spread",
    "store",
    "tfdata_orders",
    "trial",
}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(f"echo_jax.echo.{name}")
    failed, attempted = doctest.testmod(module, raise_on_error=False)
    assert failed == 0
    assert attempted > 0 or name in WITHOUT_EXAMPLE
