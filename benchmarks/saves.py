"""What it costs to save an echo, and to go on from there."""

import gc
import itertools
import json
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

import echo_jax as ej
from benchmarks.device import host_batches, make_feed
from benchmarks.harness import Result

_FACTOR = 4
_BATCH = 128
_BUFFER = 10_000  # what tf.data's shuffle holds: uses
_RECORDS = 20_000
_POSITIONS = 11  # the first does not count
_APART = _BUFFER // _BATCH // (_POSITIONS - 1)  # batches


def p11() -> list[Result]:
    """State bytes against tf.data's; time to restore against Grain's refill."""
    import grain
    from grain import experimental

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (_RECORDS, 32, 32, 3), np.uint8)
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    dataset = grain.MapDataset.source(images).repeat().to_iter_dataset(options)

    class Repeat(experimental.FlatMapTransform):
        max_fan_out = _FACTOR

        def flat_map(self, element):
            return [element] * _FACTOR

    peer = experimental.FlatMapIterDataset(dataset, Repeat())
    peer = experimental.WindowShuffleIterDataset(peer, window_size=_BUFFER, seed=0)
    peer = peer.batch(_BATCH)
    # As many distinct items as the peer's window holds.
    spec = ej.EchoSpec(_FACTOR, _BUFFER // _FACTOR, "window_shuffle", _BATCH)
    ours = ej.grain.echo(dataset, spec, batch=True)
    restores: dict[str, list[float]] = {"ours": [], "peer": [], "source": []}
    stages = {"ours": ours, "peer": peer}
    saved = {name: _states(stage) for name, stage in stages.items()}
    for position in range(_POSITIONS):
        for name, stage in stages.items():
            iterator = iter(stage)
            gc.collect()
            began = time.perf_counter()
            iterator.set_state(saved[name][position])
            next(iterator)
            restores[name].append(time.perf_counter() - began)
        items = iter(dataset)
        began = time.perf_counter()
        for _ in itertools.islice(items, spec.buffer):
            pass
        restores["source"].append(time.perf_counter() - began)
    floor = statistics.median(
        alone / peer
        for alone, peer in zip(restores["source"], restores["peer"], strict=True)
    )
    pairs = list(zip(restores["ours"], restores["peer"], strict=True))
    ratios = [ours / peer for ours, peer in pairs[1:]]
    own_bytes = len(json.dumps(saved["ours"][-1]))
    tf_bytes = _tfdata_bytes(images)
    return [
        Result(
            "P11",
            f"bytes of a saved tf.data shuffle({_BUFFER}) / of ours",
            tf_bytes / own_bytes,
            ">= 1000",
            "x",
            f"tf.data {tf_bytes / 1e6:.1f} MB; ours {own_bytes} bytes",
            [tf_bytes / own_bytes],
            f"CIFAR-shaped items, e={_FACTOR}",
        ),
        Result(
            "P11-restore",
            "time to restore and make the first batch, ours / Grain's refill",
            statistics.median(ratios),
            "<= 0.25",
            "x",
            f"Grain flat-map echo + window shuffle of {_BUFFER} uses",
            ratios,
            "both over the same Grain source; ours reads 1 to 1.25 buffers again, by "
            "where in a round it was saved: a repeat for each of ten places, evenly "
            f"far apart; to read one buffer from the source alone takes {floor:.2f}",
        ),
    ]


def _states(stage: Any) -> list[Any]:
    """States saved at places evenly far apart over a round of ours."""
    iterator = iter(stage)
    states = []
    for number in range(3 * _BUFFER // _BATCH):
        next(iterator)
        left = 3 * _BUFFER // _BATCH - 1 - number
        if left % _APART == 0 and left < _POSITIONS * _APART:
            states.append(iterator.get_state())
    return states


def _tfdata_bytes(images: np.ndarray) -> int:
    """Bytes of a checkpoint of tf.data's own echo and shuffle."""
    import tensorflow as tf

    # Drawn in the graph: a source from memory would be saved as well.
    pixels = tf.constant(images[:256])
    dataset = tf.data.Dataset.range(1 << 40).map(lambda k: pixels[k % 256])
    dataset = dataset.flat_map(
        lambda item: tf.data.Dataset.from_tensors(item).repeat(_FACTOR)
    )
    iterator = iter(dataset.shuffle(_BUFFER, seed=0).batch(_BATCH))
    for _ in range(10):
        next(iterator)
    with tempfile.TemporaryDirectory() as folder:
        tf.train.Checkpoint(iterator=iterator).save(f"{folder}/state")
        return sum(path.stat().st_size for path in Path(folder).iterdir())


def p12(pairs: int = 41) -> Result:
    """Time that a save keeps a trainer, with and without the echo's state."""
    import jax.numpy as jnp

    from echo_jax.files.folders import run_folder
    from echo_jax.training.saving.checkpoint import Checkpoints

    params = {f"layer_{k}": jnp.ones((512, 512)) for k in range(20)}
    spec = ej.EchoSpec(_FACTOR, 4096, "spread", _BATCH)
    source = _Resumable()
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(make_feed(spec, source, prefetch=2)) as feed,
    ):
        feed.take()
        top = run_folder(folder)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for number in range(pairs + 1):
            for with_echo in (False, True) if number % 2 else (True, False):
                saver = Checkpoints(top / f"{number}-{with_echo}", keep=1)
                gc.collect()
                began = time.perf_counter()
                host = {"data": feed.get_state()} if with_echo else {}
                saver.save(1, params, host)
                seconds[with_echo].append(time.perf_counter() - began)
                saver.close()
    ratios = [a / b for a, b in zip(seconds[True], seconds[False], strict=True)][1:]
    return Result(
        "P12",
        "blocking time of a save with echo state / with parameters only",
        statistics.median(ratios),
        "<= 1.05",
        "x",
        "orbax, the same 21 MB of parameters",
        ratios,
    )


class _Resumable:
    """Batches that count as an upstream with a state."""

    def __init__(self):
        self._batches = host_batches(_BATCH)
        self._taken = 0

    def __iter__(self):
        return self

    def __next__(self):
        self._taken += 1
        return next(self._batches)

    def get_state(self) -> dict[str, int]:
        return {"taken": self._taken}

    def set_state(self, state: dict[str, int]) -> None:
        self._taken = state["taken"]
        self._batches = itertools.islice(host_batches(_BATCH), self._taken, None)
