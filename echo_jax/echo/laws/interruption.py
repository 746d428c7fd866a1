"""Interrupts an echo in the middle of its work, at the same place in every run."""

import dis
import os
import sys
import sysconfig
import weakref
from itertools import islice
from types import CodeType, FrameType
from typing import Any

__all__ = ["Interrupted", "Interruption"]

_PATHS = sysconfig.get_paths()
_ECHO = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LAWS = os.path.dirname(__file__) + os.sep
_FINALIZE = weakref.finalize.__call__.__code__
# Only the echo's own code is interrupted, not Python's library or packages.
_LEFT_ALONE = (_LAWS, _PATHS["stdlib"], _PATHS["purelib"], _PATHS["platlib"], "<")


class Interrupted(BaseException):
    """Replaces a `KeyboardInterrupt`; no other code raises it."""


# It counts the lines that this thread executes, and sets `struck` when it raises. It
# raises only where Python could raise for a signal, so never between a `with` block
# and its end.
class Interruption:
    """Raises an error before the given executed line of an echo's code, from 1 on."""

    def __init__(self, line: int, error: type[BaseException] = Interrupted):
        self.struck = False
        self._left = line
        self._error = error

    def __enter__(self) -> "Interruption":
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if _is_echo(frame.f_code.co_filename) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._left -= 1
            if (
                self._left <= 0
                and not _is_spared(frame.f_code, frame.f_lasti)
                and not _is_in_finalizer(frame)
            ):
                sys.settrace(None)
                self.struck = True
                raise self._error("in the middle of an echo")
        return self._line


def _is_echo(path: str) -> bool:
    # An installed echo_jax is itself in a folder that is left alone.
    own = path.startswith(_ECHO) and not path.startswith(_LAWS)
    return own or not path.startswith(_LEFT_ALONE)


def _is_in_finalizer(frame: FrameType | None) -> bool:
    """Whether another echo is being collected, where nothing can be raised."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        # The collector calls it with the dead reference, other callers without one.
        if frame.f_code is _FINALIZE and frame.f_locals["_"] is not None:
            return True
        frame = frame.f_back
    return False


def _is_spared(code: CodeType, offset: int) -> bool:
    """Whether a signal could not raise here, or a tracer cannot raise like a signal."""
    following = (each for each in dis.get_instructions(code) if each.offset >= offset)
    first, *later = islice(following, 4)
    # In Python 3.12, an error that a tracer raises at the next element of a
    # comprehension skips the except clauses of its function.
    if first.opname == "FOR_ITER":
        return True
    # A `with` line is executed a second time to end its block.
    loads = [each for each in (first, *later) if each.opname == "LOAD_CONST"]
    return [each.argval for each in loads] == [None] * 3
