"""A profile of a few updates: the trace of `jax.profiler`, for TensorBoard or XProf.

The trace begins and ends with no update in flight, so it has whole updates only. It
ends early where the loop evaluates or saves. Each process traces its own devices.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from echo_jax.training.processes.distributed import all_gather

# A viewer takes every annotation with a number for a step.
_STEP = "training update"


class Profile:
    """Traces the updates of a run that ``config.profile`` asks for."""

    # The run is a `Trainer` that has not begun yet. If it resumes after these updates,
    # it keeps the trace. If it does them again, it traces them again.
    def __init__(self, run: Any):
        self._run = run
        self._own = run.workdir / "profile" / f"process-{jax.process_index()}"
        self._begun: int | None = None
        self._wanted = wanted = run.config.profile
        self._is_due = wanted.updates > 0 and run.totals.updates <= wanted.start

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Surrounds the next updates, and traces them if they are due."""
        run, wanted = self._run, self._wanted
        if self._is_due and run.totals.updates >= wanted.start:
            self._begin()
        if self._begun is None:
            yield
            return
        stops = (run.config.updates, run.config.eval_every, run.config.checkpoint_every)
        with jax.profiler.StepTraceAnnotation(_STEP, step_num=run.totals.updates):
            yield
            done = run.totals.updates
            is_last = done >= self._begun + wanted.updates or any(
                stop > 0 and done % stop == 0 for stop in stops
            )
            if is_last:
                self._finish_updates()
        if is_last:
            self._end(self._begun)

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
                for file in sorted(Path(folder).rglob("*")):
                    if file.is_file():
                        copy = self._own / file.relative_to(folder).as_posix()
                        copy.parent.mkdir()
                        copy.write(file.read_bytes())
        last = self._run.totals.updates
        self._run.progress.note(
            f"profiled update {begun + 1} to {last}; see {self._own.parent}"
        )
