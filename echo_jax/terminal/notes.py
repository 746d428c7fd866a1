"""Prints lines while a command runs, repeatedly while a step is slow."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console

from echo_jax.terminal.printable import printable

# The time until the first line about a slow step, and its minimum after another line.
_WONDERS_S, _LEAST_S = 3.0, 1.0
# The time until the next line, which doubles each time, and its maximum.
_AGAIN_S, _MOST_S = 5.0, 60.0

# The time of this process's last line. All lines share one output.
_last_line_s = time.monotonic()


class Notes:
    """Prints lines on a console, each with the time of day."""

    def __init__(self, console: Console | None = None):
        self._console = console or Console()
        if self._console.is_jupyter:
            # Lines, as in a log file: with HTML each line would be a separate block.
            self._console = Console(force_jupyter=False, force_terminal=False)

    def note(self, text: str) -> None:
        """Prints a line after the time of day."""
        global _last_line_s
        _last_line_s = time.monotonic()
        self._console.print(
            f"{time.strftime('%H:%M:%S')}  {printable(text)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    @contextlib.contextmanager
    def slow(self, what: str) -> Iterator[None]:
        """Prints a line about a step repeatedly while it is slow; see `pauses`."""
        is_done = threading.Event()
        given = (what, self.note, is_done.wait, silent_s())
        speaker = threading.Thread(target=say_while_slow, args=given, daemon=True)
        speaker.start()
        try:
            yield
        finally:
            is_done.set()
            speaker.join()


def silent_s() -> float:
    """Returns the seconds since the last line of this process."""
    return time.monotonic() - _last_line_s


def pauses(silent_s: float = 0.0) -> Iterator[float]:
    """Yields the seconds before each line about the same step: 3, 5, 10, ..., 60."""
    yield max(_WONDERS_S - silent_s, _LEAST_S)
    pause = _AGAIN_S
    while True:
        yield pause
        pause = min(2 * pause, _MOST_S)


def say_while_slow(
    what: str,
    say: Callable[[str], None],
    wait: Callable[[float], bool],
    silent_s: float = 0.0,
) -> None:
    """Calls `say` with the step and its duration until `wait` returns True."""
    waited_s = 0.0
    for pause in pauses(silent_s):
        if wait(pause):
            return
        how_long = f" {waited_s + pause:.0f} s" if waited_s else ""
        waited_s += pause
        try:
            say(f"{what} ...{how_long}")
        except OSError:
            return  # The output is closed; the next line will raise the error.
