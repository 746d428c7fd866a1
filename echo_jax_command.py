"""The command ``echo-jax``: Ctrl-C ends it in one line even while Python imports it.

It is outside the package, because the package's import takes a good part of a second.
"""

import os
import shlex
import signal
import sys
from types import FrameType
from typing import NoReturn

__all__ = ["main"]

_TRAINING = ("train", "study", "sweep", "probe")  # These handle signals themselves.


def main() -> int:
    """Runs the command of this process; see `echo_jax.cli.main`."""
    before = signal.getsignal(signal.SIGINT)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    # Imported here: the import is slow.
    from echo_jax import cli

    try:
        if sys.argv[1:2] and sys.argv[1] not in _TRAINING:
            signal.signal(signal.SIGINT, before)
        return cli.main()
    except KeyboardInterrupt:
        _end(signal.SIGINT, None)


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    command = ["echo-jax", *sys.argv[1:]]
    said = f"{' '.join(command[:2])}: interrupted; run the same command to resume"
    os.write(2, f"{said}\n  {shlex.join(command)}\n".encode())
    os._exit(128 + signum)
