"""The echo in one's own step gives the batches of `ej.device.echo_batches`."""

import re
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from echo_cases import LOAD, MODES, mesh_of, specs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import echo_jax as ej


def noisy(batch, keys):
    return batch ^ jax.vmap(lambda key: jax.random.bits(key, (3,), np.uint16))(keys)


def scanned(echo, arrays, fresh, integers, first):
    """All batches, and their repeats."""

    def step(arrays, inputs):
        arrays = echo.write(arrays, fresh, *inputs)
        read = jax.checkpoint(partial(echo.read, augment=noisy))
        return arrays, (read(arrays, inputs[0]), echo.repeats(inputs[0]))

    return jax.lax.scan(step, arrays, (integers, first))


def assert_is_the_iterator(run, path, spec, lanes, rows, count, shardings=None):
    """Runs a step over integers that were saved; returns its echo and its program."""
    fresh = np.arange(count * rows * 3, dtype=np.uint16).reshape(count, rows, 3)
    options = {"mesh": mesh_of(1), "num_lanes": lanes, "augment": noisy}
    with ej.device.echo_batches(
        [*fresh], spec, drop_remainder=True, tags=True, **options
    ) as batches:
        expected = [*map(jax.device_get, batches)]
    if (log := batches.log) is not None:
        # A log may end before the data does.
        log = log[: max(1, len(log) // (1 + count % 2))]
        spec, expected = replace(spec, replay=log), expected[: len(log)]
    echo = ej.device.StepEcho.of(fresh[0], spec, lanes)
    integers, taken, tags = echo.decide(count)
    np.save(path / "integers.npy", integers)
    inputs = (np.load(path / "integers.npy"), np.cumsum(taken) - taken)
    inputs = jax.device_put((echo.init(), fresh, *inputs), shardings)
    program = run.lower(echo, *inputs).compile()
    found, repeats = jax.device_get(program(*inputs)[1])
    assert inputs[0].is_deleted() and len(repeats) == len(expected)
    for at, (batch, (index, repeat)) in enumerate(expected):
        np.testing.assert_array_equal(found[at], batch)
        mine = [tags.fresh_index[at], tags.repeat[at], repeats[at]]
        np.testing.assert_array_equal(mine, [index, repeat, repeat])
        keys = jax.random.key_data(echo.keys(integers[at]))
        words = ej.seed_for_use(spec.seed, index, repeat).view(np.uint32)
        np.testing.assert_array_equal(keys, words.reshape(-1, 2))
    return echo, program.as_text()


@st.composite
def echoes(draw):
    """A spec of any mode, lanes, and the rows and the number of host batches."""
    spec, lanes, n = draw(specs()), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    size = spec.batch_size * lanes
    ring = {"buffer": 9 * size, "batch_size": size, "seed": spec.seed}
    fixed = replace(spec, buffer=8 * lanes * spec.buffer, batch_size=size)
    adaptive, random = ej.AdaptiveSpec(n, **ring), ej.StochasticSpec(LOAD, **ring)
    kinds = [(fixed, n * lanes), (fixed, size), (adaptive, n * size), (random, size)]
    spec, rows = draw(st.sampled_from(kinds))
    return spec, lanes, rows, draw(st.integers(1, 12))


@pytest.mark.parametrize(
    "examples", [1, pytest.param(200, marks=pytest.mark.exhaustive)]
)
def test_under_a_scan_it_is_the_iterator_to_the_bit(examples, tmp_path):
    run = jax.jit(scanned, static_argnums=0, donate_argnums=1)

    @settings(max_examples=examples, derandomize=True, database=None)
    @given(echoes())
    @example((ej.EchoSpec("7/3", 8, "window_shuffle", 6, 1), 1, 4, 5))
    @example((MODES["adaptive"], 1, 4, 9))
    @example((MODES["stochastic"], 2, 4, 9))
    def check(drawn):
        assert_is_the_iterator(run, tmp_path, *drawn)

    check()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit, None])
def test_on_four_devices_nothing_is_communicated(kind, tmp_path):
    """In a shard_map over axes of both kinds; with None, jit splits the program."""
    mesh, split, second = mesh_of(4, kind or AxisType.Auto), P("data"), P(None, "data")
    splits = (split, second, second, P())

    def run(echo, *inputs):
        run, outs = partial(scanned, echo), (split, second)
        if kind is not None:
            run = jax.shard_map(run, mesh=mesh, in_specs=splits, out_specs=outs)
        return run(*inputs)

    run = jax.jit(run, static_argnums=0, donate_argnums=1)
    shardings = tuple(NamedSharding(mesh, each) for each in splits)
    specs = [ej.EchoSpec(2.5, 64, "spread", 16, seed) for seed in (1, 2)]
    options = [(run, tmp_path, spec, 4, 8, 16, shardings) for spec in specs]
    found = {assert_is_the_iterator(*each) for each in options}
    # One echo and one program: another seed does not compile the step again.
    ((_, program),) = found
    assert not re.search("all-gather|all-reduce|all-to-all|collective", program)


def test_what_does_not_fit_is_refused_with_the_fix():
    fresh = np.zeros((2, 8), np.uint8)
    with pytest.raises(ValueError, match=r"Use AdaptiveSpec\(replay="):
        ej.device.StepEcho.of(fresh[0], ej.AdaptiveSpec(buffer=8, batch_size=8))
    echo = ej.device.StepEcho.of(fresh[0], ej.EchoSpec(2, batch_size=8))
    (integers, *_), *_ = echo.decide(2)
    for other, error in (
        (np.float32(fresh), "pad or crop"),
        (fresh[:, 1:], "one size"),
    ):
        with pytest.raises(ValueError, match=error):
            echo.write(echo.init(), other, integers)
