"""Prints lines while a command runs, repeatedly while a step is slow."""

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Iterator

from rich.console import Console

from echo_jax.terminal import ending
from echo_jax.terminal.printable import printable

# The seconds before each line about a slow step; then always `_AGAIN_S`.
_PAUSES_S = (3.0, 5.0, 10.0, 20.0, 40.0)
_AGAIN_S = 60.0

# The time of this process's last line. All lines share one output.
_last_line_s = time.monotonic()


class _Console(Console):
    """A console whose command goes on when its reader goes away, as `head` does."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        ending.drop_lost_outputs()
        said = "nobody reads its output any more; it goes on, and prints no more"
        print(f"echo-jax: {said}", file=sys.stderr, flush=True)


class Notes:
    """Prints lines on a console, each with the time of day."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False):
        self._console = console or _Console(quiet=quiet)
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
        """Prints a line about a step, and how long it takes, again and again."""
        is_done = threading.Event()

        def speak() -> None:
            waited_s = 0.0
            for pause in itertools.chain(_PAUSES_S, itertools.repeat(_AGAIN_S)):
                if is_done.wait(pause):
                    return
                waited_s += pause
                with contextlib.suppress(OSError):  # The terminal may be hung up.
                    self.note(f"{what} ... {waited_s:.0f} s")

        speaker = threading.Thread(target=speak, daemon=True)
        speaker.start()
        try:
            yield
        finally:
            is_done.set()
            speaker.join()


def silent_s() -> float:
    """Returns the seconds since the last line of this process."""
    return time.monotonic() - _last_line_s
