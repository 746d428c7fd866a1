"""What is written of a model for people: all parameters of it, compiling nothing."""

import math

import jax
import pytest
from compilations import counted_compilations

from echo_jax.config import load_config
from echo_jax.workloads import make_task

INFO = {
    "classes": [*"abcde"],
    "categories": [*"abc"],
    "vocab": 300,
    "eod": None,
    "bytes_per_token": None,
}


@pytest.mark.parametrize("name", ["cifar", "coco", "imagenet", "lm", "shapes"])
def test_a_table_counts_every_parameter_and_compiles_nothing(name):
    task = make_task(load_config(f"configs/{name}.py:tiny"), INFO)
    shapes = jax.eval_shape(task.init, jax.random.key(0))["params"]
    total = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    with counted_compilations() as compiled:
        table = task.table()
    assert f" {total:,} (" in table.splitlines()[-4]
    assert not compiled
    assert "\x1b" not in table and not any(x != x.rstrip() for x in table.splitlines())
