"""Lines that a command says, again and again while something is slow."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console

from echo_jax.terminal.printable import printable

__all__ = ["Notes", "pauses", "say_while_slow", "silent_s"]

# After how long it is said what takes so long, and at least, whatever was said before.
_WONDERS_S, _LEAST_S = 3.0, 1.0
# How long until it is said again: twice as long each time.
_AGAIN_S, _MOST_S = 5.0, 60.0

# When this process said something last: all that it says stands one below the other.
_last_line_s = time.monotonic()


class Notes:
    """Says lines on a console, each with the time of day.

    Args:
      console: Where to; None for standard output.
      mark: Put before every line.

    Example:
      >>> with Notes().slow("reading the data"):  # Says so from the third second on.
      ...     workload = build(config)
    """

    def __init__(self, console: Console | None = None, *, mark: str = ""):
        self._console = console or Console()
        if self._console.is_jupyter:
            # Lines, as in a log file: of HTML each would be a block of its own.
            self._console = Console(force_jupyter=False, force_terminal=False)
        self._mark = f"{mark}  " if mark else ""

    def note(self, text: str) -> None:
        """Prints a line.

        Args:
          text: One line; the time of day is put before it.
        """
        global _last_line_s
        _last_line_s = time.monotonic()
        self._console.print(
            f"{time.strftime('%H:%M:%S')}  {self._mark}{printable(text)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    @contextlib.contextmanager
    def slow(self, what: str) -> Iterator[None]:
        """Says what is done, again and again if it takes long; see `pauses`.

        Args:
          what: Such as "compiling the update".
        """
        is_done = threading.Event()
        speaker = threading.Thread(
            target=say_while_slow,
            args=(what, self.note, is_done.wait, silent_s()),
            daemon=True,
        )
        speaker.start()
        try:
            yield
        finally:
            is_done.set()
            speaker.join()


def silent_s() -> float:
    """Returns how long ago the last line of this process was, in seconds."""
    return time.monotonic() - _last_line_s


def pauses(silent_s: float = 0.0) -> Iterator[float]:
    """Yields how long to be silent before each line on the same thing, in seconds.

    Args:
      silent_s: How long nothing was said before it was begun.

    Example:
      >>> [*itertools.islice(pauses(), 6)]
      [3.0, 5.0, 10.0, 20.0, 40.0, 60.0]
      >>> next(pauses(silent_s=1.5))
      1.5
    """
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
    """Says what is done again and again, and for how long by now, until it is done.

    Args:
      what: A few words.
      say: Prints a line.
      wait: Waits for so many seconds, or until it is done, and returns whether it is.
      silent_s: See `pauses`.
    """
    waited_s = 0.0
    for pause in pauses(silent_s):
        if wait(pause):
            return
        how_long = f" {waited_s + pause:.0f} s" if waited_s else ""
        waited_s += pause
        try:
            say(f"{what} ...{how_long}")
        except OSError:
            return  # Nobody reads on: who says the next line finds out by itself.
