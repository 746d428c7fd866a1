"""What the training loop itself does on the host for an update, in Python."""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from benchmarks.harness import Result
from echo_jax.config import load_config
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.loop import train
from echo_jax.workloads import build

_CONFIG = Path(__file__).parent.parent / "configs" / "lm.py"
_WARM, _UPDATES, _REPEATS = 200, 1000, 7


def training_loop() -> Result:
    """Microseconds of the loop's own thread for an update."""
    config = load_config(f"{_CONFIG}:tiny")
    updates = _WARM + _REPEATS * _UPDATES
    config.updates = config.eval_every = config.log_every = updates + 1
    config.checkpoint_every = 0
    config.stop_at_target = False
    repeats: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        _nothing_but_the_loop(repeats),
        contextlib.suppress(_EnoughMeasured),
    ):
        console = Console(file=StringIO(), force_terminal=False)
        train(config, build(config), Path(folder) / "run", console=console)
    return Result(
        "own",
        "the training loop's own work for an update: take, dispatch, read, counts, "
        "clocks",
        statistics.median(repeats),
        "<= 10",
        "us",
        "none: an absolute time, of this machine",
        repeats,
        "seconds of the processor in the loop's thread; every update has the input of "
        f"the first, and its step returns what that returned; {_UPDATES} updates a "
        "repeat",
    )


class _EnoughMeasured(BaseException):
    """Leaves the loop, saving nothing."""


@contextlib.contextmanager
def _nothing_but_the_loop(repeats: list[float]) -> Iterator[None]:
    """Lets all updates be the first one, without its work, and appends their times."""
    step = CompiledFunctions.step
    done: list[Any] = []
    count, began = 0, 0.0

    def empty(self: Any, state: Any, feed: Any, inputs: Any, **options: Any) -> Any:
        nonlocal count, began
        if not done:
            done.append(step(self, state, feed, inputs, **options))
            feed.take = lambda num_updates: inputs
        self.program(feed.batching, options.get("syncs", False))
        count += 1
        if count >= _WARM and (count - _WARM) % _UPDATES == 0:
            now = time.thread_time()
            if began:
                repeats.append((now - began) / _UPDATES * 1e6)
            if len(repeats) == _REPEATS:
                raise _EnoughMeasured
            began = now
        return done[0]

    with mock.patch.object(CompiledFunctions, "step", empty):
        yield
