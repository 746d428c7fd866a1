"""The examples in the docstrings of the library are true."""

import doctest
import importlib
import pkgutil

import pytest

# `echo_jax.echo`, as an attribute, is the function.
PACKAGE = importlib.import_module("echo_jax.echo")
PREFIX = "echo_jax.echo."
MODULES = sorted(
    module.name.removeprefix(PREFIX)
    for module in pkgutil.walk_packages(PACKAGE.__path__, PREFIX)
)
# Modules whose public names are shown at work in another module's example.
WITHOUT_EXAMPLE = {
    "adapters",
    "adapters.tensorflow_extra",
    "adapters.tfdata_graph",
    "adapters.tfdata_orders",
    "counts",
    "device_feed",
    "driver",
    "instrument",
    "laws.bounds",
    "laws.checks",
    "laws.consumers",
    "laws.failures",
    "laws.interruption",
    "laws.modes",
    "laws.order_bounds",
    "laws.harness",
    "laws.orders",
    "orders",
    "orders.base",
    "orders.consecutive",
    "orders.shuffle",
    "orders.shuffle_buffer",
    "orders.sorting",
    "orders.spread",
    "plans",
    "plans.base",
    "plans.fixed_lane",
    "reader",
    "source",
    "stores",
    "stores.host",
}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(PREFIX + name)
    failed, attempted = doctest.testmod(module, raise_on_error=False)
    assert failed == 0
    assert attempted > 0 or name in WITHOUT_EXAMPLE
