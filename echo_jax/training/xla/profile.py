"""A profile of a few updates: the trace for a viewer, and what it says of collectives.

The trace begins and ends with no update in flight, so that it holds whole ones, and
ends early where the loop would evaluate or save, so that it holds nothing else. Every
process of a run traces its own devices, into a folder of its own; what they say of
collectives is a mean over the devices of all.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import jax

from echo_jax.config import Config
from echo_jax.files.folders import RunPath
from echo_jax.files.json_files import read_if_whole
from echo_jax.training.clock import Clock
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.processes.distributed import (
    all_gather,
    broadcast_from_first,
    is_main_process,
)
from echo_jax.training.records.progress import Progress
from echo_jax.training.records.runfiles import write_json_once
from echo_jax.training.records.totals import Totals
from echo_jax.training.xla.collectives import Share, Trace, read_trace

__all__ = ["Profile"]

# A viewer takes every annotation with a number for a step.
_STEP = "training update"
_NOTHING = contextlib.nullcontext()


class Run(Protocol):
    """What is used here of an `echo_jax.training.trainer.Trainer`."""

    config: Config
    workdir: RunPath
    compiled: CompiledFunctions
    state: Any
    totals: Totals
    clock: Clock
    progress: Progress

    def read(self, *, leave: int) -> None:
        """Waits for dispatches in flight."""
        ...


class Profile:
    """Traces the updates of a run that ``config.profile`` asks for.

    What was measured stands in ``WORKDIR/profile/collectives.json``. A run that
    resumes behind it keeps that; one that does its updates again, also traces again.

    Args:
      run: Not begun yet.

    Example:
      >>> with contextlib.closing(Profile(run)) as profile:
      ...     while run.totals.updates < 60:
      ...         with profile.around():
      ...             run.dispatch(run.take())
      ...             run.read()
      >>> profile.result()["collective_fraction"]
      0.41
    """

    def __init__(self, run: Run):
        self._run = run
        self._folder = run.workdir / "profile"
        self._file = self._folder / "collectives.json"
        self._own = self._folder / f"process-{jax.process_index()}"
        self._begun: int | None = None
        done = run.totals.updates
        wanted = run.config.profile
        self._is_due = wanted.updates > 0 and done <= wanted.start
        kept = broadcast_from_first(read_if_whole(self._file, {"first_update": int}))
        if kept and done < kept["first_update"] and is_main_process():
            self._folder.remove()

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

    def result(self) -> dict[str, Any] | None:
        """Returns what was measured, also before a resumption; None if nothing."""
        if self._is_due:
            self._run.progress.note(
                f"nothing was profiled: after update {self._wanted.start} of "
                "--config.profile.start no update began"
            )
        return broadcast_from_first(read_if_whole(self._file))

    @property
    def _wanted(self) -> Any:
        return self._run.config.profile

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
                written = Path(folder)
                _copy(written, self._own)
                file = next(written.glob("plugins/profile/*/*.xplane.pb"), None)
                trace = read_trace(file, _STEP) if file else None
            result = {
                "first_update": begun + 1,
                "updates": self._run.totals.updates - begun,
                **self._of_all(trace),
            }
            write_json_once(self._file, result)
        self._run.progress.note(_in_words(result, self._folder))

    def _of_all(self, trace: Trace | None) -> dict[str, Any]:
        """Returns what the traces of all processes say together."""
        shares = [*trace.shares().values()] if trace else []
        mesh = self._run.compiled.mesh
        num_own = sum(
            device.process_index == jax.process_index() for device in mesh.devices.flat
        )
        own = {
            "seconds": trace.seconds if trace else None,
            # A device that is missing may be the one that waits, or that is waited for.
            "shares": [asdict(share) for share in shares]
            if len(shares) >= num_own
            else None,
        }
        everybody = all_gather(own)
        result = {
            "seconds": everybody[0]["seconds"],
            "devices": mesh.devices.size,
            "collective_fraction": None,
            "exposed_fraction": None,
            "collective_fraction_by_device": None,
        }
        if all(each["shares"] is not None for each in everybody):
            found = [Share(**share) for each in everybody for share in each["shares"]]
            result |= {
                "collective_fraction": fmean(share.collective for share in found),
                "exposed_fraction": fmean(share.exposed for share in found),
                "collective_fraction_by_device": [share.collective for share in found],
            }
        return result


def _copy(source: Path, folder: RunPath) -> None:
    for file in sorted(source.rglob("*")):
        if file.is_file():
            copy = folder / file.relative_to(source).as_posix()
            copy.parent.mkdir()
            copy.write(file.read_bytes())


def _in_words(result: dict[str, Any], folder: RunPath) -> str:
    first, updates = result["first_update"], result["updates"]
    fraction = result["collective_fraction"]
    what = (
        "the trace tells nothing of collectives"
        if fraction is None
        else f"{fraction:.1%} of the time in collectives"
    )
    return f"profiled update {first} to {first + updates - 1}: {what}; see {folder}"
