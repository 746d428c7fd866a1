"""The specs that several tests of the echo library run through."""

import itertools

import grain
import jax
import numpy as np
from hypothesis import strategies as st

import echo_jax as ej
from echo_jax.echo.plans.base import outputs_of

ORDERS = ("consecutive", "window_shuffle", "shuffle_buffer", "spread")
FACTORS = {
    "1": 1,
    "1.15": 1.15,
    "1.5": 1.5,
    "2": 2,
    "4": 4,
    "7.3": 7.3,
    "piecewise": {0: 1, 13: 3, 20: "5/4"},
    "by_item": ej.FactorByItem(lambda k: 1 + (k % 5) * 0.5, max_factor=3),
}
# Fresh items kept, and the batch size. `spread` needs this much at factor 7.3.
SIZES = {
    "consecutive": (1, 4),
    "window_shuffle": (10, 4),
    "shuffle_buffer": (10, 4),
    "spread": (24, 4),
}


def spec_of(order, factor, seed=3):
    """One spec of an order, for a factor named in `FACTORS`."""
    buffer, batch_size = SIZES[order]
    return ej.EchoSpec(FACTORS[factor], buffer, order, batch_size, seed)


def host_echo(upstream, spec):
    return ej.echo(upstream, spec, tags=True)


def host_batches(upstream, spec):
    return ej.echo(upstream, spec, batch=True, tags=True)


def take(plan, uses, size=1):
    """The next uses of a plan whose upstream has whatever it needs."""
    outputs = outputs_of(plan, 10**9, size)
    return [part for _, part in itertools.islice(outputs, -(-uses // size))]


def grain_source(items):
    """A dataset that reads in this process and thread, item by item."""
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return grain.MapDataset.source(items).to_iter_dataset(options)


def mesh_of(num_devices, kind=jax.sharding.AxisType.Auto):
    devices = jax.devices()[:num_devices]
    return jax.make_mesh((num_devices,), ("data",), axis_types=(kind,), devices=devices)


class Stacked:
    """Stacks items of a counting upstream, as a reader of batches does."""

    def __init__(self, upstream, size):
        self.upstream, self.size = upstream, size
        self.get_state, self.set_state = upstream.get_state, upstream.set_state

    def __iter__(self):
        return self

    def __next__(self):
        before = self.get_state()
        try:
            items = list(itertools.islice(self.upstream, self.size))
            if not items:
                raise StopIteration
            return {key: np.stack([item[key] for item in items]) for key in items[0]}
        except Exception:
            self.set_state(before)  # What came before the failure is read again.
            raise


class Fetched:
    """An echo on a device, whose batches are fetched by code that no signal stops."""

    def __init__(self, upstream, spec, prefetch=0, lanes=1):
        # Items of a fixed echo are read one by one, as on the host.
        size = lanes if isinstance(spec, ej.EchoSpec) else spec.batch_size
        options = {"mesh": mesh_of(1), "prefetch": prefetch, "num_lanes": lanes}
        batches = Stacked(upstream, size)
        self.echo = ej.device.echo_batches(batches, spec, tags=True, **options)
        self.outputs = map(jax.device_get, self.echo)

    def __getattr__(self, name):
        return getattr(self.echo, name)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.outputs)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.echo.close()


def item_of(index):
    """An item of types that a device has."""
    return {"index": np.int32(index), "payload": np.arange(4, dtype=np.uint8) + index}


# Other modes than the fixed one; their seeds show every kind of batch in few items.
LOAD = ej.FetchSchedule(start=0.4, end=0.4)
MODES = {
    "adaptive": ej.AdaptiveSpec(max_uses=3, buffer=12, batch_size=4, seed=1),
    "adaptive-twice": ej.AdaptiveSpec(4, buffer=12, batch_size=4, min_uses=2),
    "stochastic": ej.StochasticSpec(LOAD, buffer=10, batch_size=4, seed=2),
}


def ahead_of(spec):
    """How many items an echo of a spec reads ahead unless it is told otherwise."""
    return 3 * spec.batch_size if isinstance(spec, ej.AdaptiveSpec) else 0


def _factors():
    fractions = st.fractions(1, 9, max_denominator=30)
    numbers = st.one_of(st.integers(1, 9), fractions, fractions.map(float))
    pieces = st.dictionaries(st.integers(1, 60), numbers, max_size=3)
    piecewise = st.builds(lambda first, rest: {0: first} | rest, numbers, pieces)
    return st.one_of(numbers, piecewise)


def _spec(factor, buffer, order, batch_size, seed):
    try:
        spec = ej.EchoSpec(factor, buffer, order, batch_size, seed)
        ej.echo([], spec)
    except ValueError as error:
        # Too small a buffer for `spread`: take one that is not.
        assert "buffer" in str(error)
        return _spec(factor, buffer * 2, order, batch_size, seed)
    return spec


def specs(orders=ORDERS, max_buffer=60):
    """A Hypothesis strategy for specs that can be carried out."""
    return st.builds(
        _spec,
        _factors(),
        st.integers(1, max_buffer),
        st.sampled_from(orders),
        st.integers(1, 12),
        st.integers(0, 2**40),
    )
