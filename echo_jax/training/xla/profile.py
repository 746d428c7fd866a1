"""A profile of a few updates: the trace of `jax.profiler`, for TensorBoard or XProf.

The trace begins and ends with no update in flight, so that it holds whole ones, and
ends early where the loop would evaluate or save, so that it holds nothing else. Every
process of a run traces its own devices, into a folder of its own.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import jax

from echo_jax.config import Config
from echo_jax.files.folders import RunPath
from echo_jax.training.clock import Clock
from echo_jax.training.processes.distributed import all_gather
from echo_jax.training.records.progress import Progress
from echo_jax.training.records.totals import Totals

__all__ = ["Profile"]

# A viewer takes every annotation with a number for a step.
_STEP = "training update"
_NOTHING = contextlib.nullcontext()


class Run(Protocol):
    """What is used here of an `echo_jax.training.trainer.Trainer`."""

    config: Config
    workdir: RunPath
    state: Any
    totals: Totals
    clock: Clock
    progress: Progress

    def read(self, *, leave: int) -> None:
        """Waits for dispatches in flight."""
        ...


class Profile:
    """Traces the updates of a run that ``config.profile`` asks for.

    A run that resumes behind it keeps the trace; one that does its updates again, also
    traces again.

    Args:
      run: Not begun yet.

    Example:
      >>> with contextlib.closing(Profile(run)) as profile:
      ...     while run.totals.updates < 60:
      ...         with profile.around():
      ...             run.dispatch(run.take())
      ...             run.read()
    """

    def __init__(self, run: Run):
        self._run = run
        self._own = run.workdir / "profile" / f"process-{jax.process_index()}"
        self._begun: int | None = None
        self._wanted = wanted = run.config.profile
        self._is_due = wanted.updates > 0 and run.totals.updates <= wanted.start

    def around(self) -> contextlib.AbstractContextManager[None]:
        """Surrounds the next updates, and traces them if they are due."""
        if self._is_due and self._run.totals.updates >= self._wanted.start:
            self._begin()
        return _NOTHING if self._begun is None else self._traced(self._begun)

    @contextlib.contextmanager
    def _traced(self, begun: int) -> Iterator[None]:
        first = self._run.totals.updates
        with jax.profiler.StepTraceAnnotation(_STEP, step_num=first):
            yield
            is_last = self._is_last(begun)
            if is_last:
                self._finish_updates()
        if is_last:
            self._end(begun)

    def close(self) -> None:
        """Drops a trace that was not finished."""
        if self._begun is not None:
            self._begun = None
            jax.profiler.stop_trace()
            self._written.cleanup()

    def say_if_missed(self) -> None:
        """Says at the end of a run that nothing was traced, though it was asked for."""
        if self._is_due:
            self._run.progress.note(
                f"nothing was profiled: after update {self._wanted.start} of "
                "--config.profile.start no update began"
            )

    def _is_last(self, begun: int) -> bool:
        config, done = self._run.config, self._run.totals.updates
        stops = (config.updates, config.eval_every, config.checkpoint_every)
        return done >= begun + self._wanted.updates or any(
            stop > 0 and done % stop == 0 for stop in stops
        )

    def _finish_updates(self) -> None:
        self._run.read(leave=0)
        jax.block_until_ready(self._run.state)

    def _begin(self) -> None:
        self._is_due = False
        self._finish_updates()
        with self._run.clock.phase("pause"):
            self._own.remove()
            # The profiler writes to local disks alone.
            self._written = tempfile.TemporaryDirectory()
            options = jax.profiler.ProfileOptions()
            # The calls of Python would be most of the trace, and slow the host down.
            options.python_tracer_level = 0
            jax.profiler.start_trace(self._written.name, profiler_options=options)
            self._begun = self._run.totals.updates
            # Together: who starts first would wait in the first collective.
            all_gather(None)

    def _end(self, begun: int) -> None:
        with self._run.clock.phase("pause"):
            self._begun = None
            jax.profiler.stop_trace()
            with self._written as folder:
                _copy(Path(folder), self._own)
        last = self._run.totals.updates
        self._run.progress.note(
            f"profiled update {begun + 1} to {last}; see {self._own.parent}"
        )


def _copy(source: Path, folder: RunPath) -> None:
    for file in sorted(source.rglob("*")):
        if file.is_file():
            copy = folder / file.relative_to(source).as_posix()
            copy.parent.mkdir()
            copy.write(file.read_bytes())
