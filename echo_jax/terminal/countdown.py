"""Shows a command's progress on standard error: a bar on a terminal, else lines."""

import sys
import time
from datetime import timedelta
from typing import Self

from rich import progress
from rich.console import Console

from echo_jax.terminal.printable import printable


# Without a terminal, every new step prints a line. Its progress prints a line at most
# every `line_every_s`.
class Countdown:
    """Shows the current step, its progress, and the time left."""

    def __init__(self, *, line_every_s: float = 0.0):
        self._line_every_s, self._next_line_s = line_every_s, 0.0
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TextColumn("ETA"),
            progress.TimeRemainingColumn(),
            console=(console := Console(stderr=True)),
            get_time=time.monotonic,
            speed_estimate_period=float("inf"),
            # Leave the cores to the work itself.
            refresh_per_second=2,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=1.0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, what: str, done: float) -> None:
        """Shows the current step and the fraction done, which may restart."""
        now, what = time.monotonic(), printable(what)
        (task,) = self._bar.tasks
        if what != task.description:
            self._next_line_s = now
        if what != task.description or done < task.completed:
            self._bar.reset(self._task)
        self._bar.update(self._task, description=what, completed=done)
        if self._bar.disable and now >= self._next_line_s:
            self._next_line_s = now + self._line_every_s
            left_s = task.time_remaining
            eta = "" if left_s is None else f"  ETA {timedelta(seconds=left_s)}"
            print(f"{done:4.0%}  {what}{eta}", file=sys.stderr, flush=True)
