"""The echo on the host: speed against its peers, order, exactness, memory."""

import itertools
import math
import statistics
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import echo_jax as ej
from benchmarks.harness import Result, paired, seconds
from echo_jax.echo.plans.base import outputs_of
from echo_jax.echo.plans.fixed import FixedPlan
from echo_jax.echo.plans.lanes import Lanes

_FACTOR = 4
_BATCH = 128
_WINDOW = 4096  # uses that the peers' shuffles hold
_ITEMS = 8192


def _cifar_like(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, 32, 32, 3), np.uint8)
    return images, rng.integers(0, 10, count, np.int32)


def _stacks(images: np.ndarray, labels: np.ndarray) -> Iterator[dict[str, Any]]:
    for at in itertools.cycle(range(0, len(images), _BATCH)):
        part = slice(at, at + _BATCH)
        yield {"image": images[part], "label": labels[part, None]}


def _items(images: np.ndarray, labels: np.ndarray) -> Iterator[dict[str, Any]]:
    for at in itertools.cycle(range(len(images))):
        yield {"image": images[at], "label": labels[at : at + 1]}


def _time_batches(batches: Iterator[Any], count: int) -> float:
    """Seconds per batch after the buffers are full."""
    warm = 3 * _WINDOW // _BATCH
    for _ in range(warm):
        next(batches)
    # Batches are let go at once, as a training loop does.
    return seconds(lambda: deque(itertools.islice(batches, count), 0)) / count


def _ours(images: np.ndarray, labels: np.ndarray, stacked: bool) -> float:
    # As many distinct items as the peers' windows hold: uses / factor.
    spec = ej.EchoSpec(_FACTOR, _WINDOW // _FACTOR, "window_shuffle", _BATCH)
    if stacked:
        batches = ej.echo_batches(_stacks(images, labels), spec)
    else:
        batches = ej.echo(_items(images, labels), spec, batch=True)
    return _time_batches(batches, 500)


def p5() -> list[Result]:
    """Echo, shuffle and batch: Grain's own stages against ours."""
    import grain
    from grain import experimental

    images, labels = _cifar_like(_ITEMS)
    records = [
        {"image": image, "label": labels[at : at + 1]}
        for at, image in enumerate(images)
    ]

    class Repeat(experimental.FlatMapTransform):
        max_fan_out = _FACTOR

        def flat_map(self, element):
            return [element] * _FACTOR

    def peer() -> float:
        source = grain.MapDataset.source(records).repeat()
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        dataset = experimental.FlatMapIterDataset(
            source.to_iter_dataset(options), Repeat()
        )
        dataset = experimental.WindowShuffleIterDataset(
            dataset, window_size=_WINDOW, seed=0
        )
        return _time_batches(iter(dataset.batch(_BATCH)), 60)

    return _compared("P5", "Grain flat-map echo + window shuffle + batch", peer)


def p6() -> list[Result]:
    """The same against tf.data's stages."""
    import tensorflow as tf

    images, labels = _cifar_like(_ITEMS)

    def peer() -> float:
        dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat()
        dataset = dataset.flat_map(
            lambda *item: tf.data.Dataset.from_tensors(item).repeat(_FACTOR)
        )
        dataset = dataset.shuffle(_WINDOW, seed=0).batch(_BATCH)
        return _time_batches(dataset.as_numpy_iterator(), 60)

    name = "tf.data flat_map(from_tensors.repeat(4)) + shuffle + batch, all cores"
    return _compared("P6", name, peer)


def _compared(id_: str, name: str, peer: Callable[[], float]) -> list[Result]:
    images, labels = _cifar_like(_ITEMS)
    results = []
    batches = "our upstream hands over batches of 128"
    items = "our upstream hands over items one at a time"
    for suffix, stacked, note, goal in (
        ("", True, batches, 20 if id_ == "P5" else 60),
        ("-items", False, items, 33),
    ):
        ratio, repeats = paired(
            lambda stacked=stacked: _ours(images, labels, stacked), peer
        )
        results.append(
            Result(
                id_ + suffix,
                "throughput of echo + shuffle + batch, CIFAR-shaped items, e=4",
                ratio,
                f">= {goal}",
                "x",
                name,
                repeats,
                f"{note}; each over its in-memory source, shuffles of {_WINDOW} uses",
            )
        )
    return results


def _uses(spec: ej.EchoSpec, batches: int) -> tuple[np.ndarray, np.ndarray, FixedPlan]:
    """Indices and repeats of some batches, one row each."""
    plan = FixedPlan(spec, lanes=Lanes(spec.batch_size))
    outputs = outputs_of(plan, sys.maxsize, spec.batch_size)
    uses = [found for _, found in itertools.islice(outputs, batches)]
    index, repeat = ([getattr(x, name)[0] for x in uses] for name in _TAGS)
    return np.array(index), np.array(repeat), plan


_TAGS = "fresh_index", "repeat"


def p15() -> Result:
    """Fresh items never used, and uses beyond ceil(e)."""
    wrong = []
    for order in ("consecutive", "window_shuffle", "spread"):
        for factor in (1.15, 2, 2.5, 4):
            spec = ej.EchoSpec(factor, 1024, order, 64)
            uses = np.zeros(20_000, np.int64)
            for index in ej.echo(range(20_000), spec):
                uses[index] += 1
            beyond = uses > math.ceil(factor)
            wrong.append(float((uses == 0).sum() + beyond.sum()))
    rng = np.random.default_rng(0)
    drawn = np.bincount(rng.integers(0, 20_000, 40_000), minlength=20_000)
    return Result(
        "P15",
        "fresh items never used, or used more than ceil(e) times",
        max(wrong),
        "== 0",
        "items of 20000",
        f"uniform replay at e=2 never uses {(drawn == 0).mean():.1%}",
        wrong,
        "3 orders x factors 1.15, 2, 2.5, 4",
    )


def _difference_entropy(index: np.ndarray, batch: int) -> float:
    """Bits in the index difference of two examples of a batch, in 64 bins.

    A batch is a set: its order within is of no account, so it is permuted first.
    """
    rows = index[: index.size // batch * batch].reshape(-1, batch)
    differences = np.diff(np.random.default_rng(1).permuted(rows, axis=1), axis=1)
    bound = np.abs(differences).max()
    counts, _ = np.histogram(differences, 64, (-bound, bound))
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def p16() -> list[Result]:
    """Order quality of ``spread``: mixing, twins, lag."""
    batch, buffer, factor = 64, 4096, 4
    spec = ej.EchoSpec(factor, buffer, "spread", batch)
    index, repeat, _ = _uses(spec, 2500)
    flat, tags = index.reshape(-1), repeat.reshape(-1)
    steady = slice(flat.size // 2, None)
    # The peer: the same uses, each stretch of a full buffer's uses permuted anew.
    rng = np.random.default_rng(0)
    stretch = buffer * factor // (factor - 1)
    tail = flat[steady][: flat[steady].size // stretch * stretch]
    permuted = rng.permuted(tail.reshape(-1, stretch), axis=1).reshape(-1)
    ratio = _difference_entropy(tail, batch) / _difference_entropy(permuted, batch)
    twins = sum(len(np.unique(row)) < batch for row in index)
    order = np.lexsort((tags, flat))
    same = np.diff(flat[order]) == 0
    lags = np.diff(order)[same & (order[:-1] >= flat.size // 2)]
    largest = buffer * factor / (factor - 1)
    return [
        Result(
            "P16a",
            "entropy of index differences within batches, spread / full permutation",
            ratio,
            ">= 0.99",
            "x",
            "every stretch of a buffer's uses permuted at random",
            [ratio],
        ),
        Result(
            "P16b",
            "batches of 64 that hold an item twice",
            float(twins),
            "== 0",
            "of 2500",
            "shuffle: " + str(_twins_of_shuffle(buffer, batch)),
            [float(twins)],
        ),
        Result(
            "P16c",
            "mean lag / the largest that the buffer allows, M e / (e - 1) uses",
            float(lags.mean()) / largest,
            ">= 0.9",
            "x",
            "the bound",
            [float(lags.mean()) / largest],
        ),
    ]


def _twins_of_shuffle(buffer: int, batch: int) -> int:
    index, _, _ = _uses(ej.EchoSpec(4, buffer, "window_shuffle", batch), 2500)
    return sum(len(np.unique(row)) < batch for row in index)


def memory() -> list[Result]:
    """Host memory of an echo, against the bytes of the buffered items."""
    results = []
    images, labels = _cifar_like(256)
    for order in ("window_shuffle", "spread"):
        spec = ej.EchoSpec(_FACTOR, 32_768, order, _BATCH)
        tracemalloc.start()
        batches = ej.echo(_items(images, labels), spec, batch=True)
        for _ in range(8 * 32_768 // _BATCH):
            next(batches)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        value = held / (32_768 * (images[0].nbytes + labels[:1].nbytes))
        results.append(
            Result(
                f"memory-{order}",
                f"host memory of a {order} echo / bytes of its buffered items",
                value,
                "<= 1.05",
                "x",
                "the items",
                [value],
                "buffer of 32768 CIFAR-shaped items, e=4",
            )
        )
    return results


def plan_cost() -> list[Result]:
    """Time of the plan alone for a batch of 1024, in steady state.

    As a driver asks, which decides many batches in one go.
    """

    def batches(plan: FixedPlan) -> int:
        found = plan.decide(1024, 0)
        assert found is not None, "the stream never ends"
        plan.settle(found.uses.size, int(found.rows[-1]))
        return found.uses.size // 1024

    results = []
    for order, goal in (("consecutive", 10), ("window_shuffle", 25), ("spread", 20)):
        repeats = []
        for _ in range(7):
            spec = ej.EchoSpec(_FACTOR, 32_768, order, 1024)
            plan = FixedPlan(spec, lanes=Lanes(1024))
            for _ in range(8 * 32):
                batches(plan)
            start = time.perf_counter()
            count = sum(batches(plan) for _ in range(500))
            repeats.append((time.perf_counter() - start) / count * 1e6)
        results.append(
            Result(
                f"plan-{order}",
                f"the plan of a batch of 1024, order {order}, e=4",
                statistics.median(repeats),
                f"<= {goal}",
                "us",
                "none: an absolute time, of this machine",
                repeats,
            )
        )
    return results
