"""Shows a command's progress on standard error: a bar on a terminal, else lines."""

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from echo_jax.terminal.printable import printable


# Without a terminal, every new step prints a line. Its progress prints a line at most
# every `line_every_s`.
class Countdown:
    """Shows the current step, its progress, and the time left."""

    def __init__(self, *, line_every_s: float = 0.0):
        self._console = Console(stderr=True)
        self._line_every_s = line_every_s
        self._what, self._done = "", 0.0
        self._began_s, self._began_at, self._next_line_s = 0.0, 0.0, 0.0
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            # Leave the cores to the work itself.
            refresh_per_second=2,
            transient=True,
            disable=not self._console.is_terminal,
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
        if done < self._done:
            self._bar.reset(self._task)
        if what != self._what:
            self._what, self._next_line_s = what, now
            self._began_s, self._began_at = now, done
        self._done = done
        self._bar.update(self._task, description=what, completed=done)
        if not self._console.is_terminal and now >= self._next_line_s:
            self._next_line_s = now + self._line_every_s
            print(f"{done:4.0%}  {what}{self._eta(now)}", file=sys.stderr, flush=True)

    def _eta(self, now: float) -> str:
        gained = self._done - self._began_at
        if gained <= 0:
            return ""
        seconds = round((now - self._began_s) * (1 - self._done) / gained)
        return f"  ETA {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
