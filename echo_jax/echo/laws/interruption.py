"""Interrupts an echo in the middle of what it does, at the same place in every run."""

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
# The echo's own code: what it calls in Python's library and in packages is left alone.
_LEFT_ALONE = (_LAWS, _PATHS["stdlib"], _PATHS["purelib"], _PATHS["platlib"], "<")


class Interrupted(BaseException):
    """Stands for a `KeyboardInterrupt`, which nobody else raises."""


class Interruption:
    """A context in which an error is raised before a line of an echo's code.

    Lines are counted as they are run, by this thread. Raised where Python could raise
    it for a signal, so never between a ``with`` block and its end.

    Attributes:
      struck: Whether it was raised.
    """

    def __init__(self, line: int, error: type[BaseException] = Interrupted):
        """Waits for the context.

        Args:
          line: Before which line, from 1 on; none if fewer are run.
          error: What is raised.
        """
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
    # Where echo_jax is installed as a package it lies among those left alone.
    own = path.startswith(_ECHO) and not path.startswith(_LAWS)
    return own or not path.startswith(_LEFT_ALONE)


def _is_in_finalizer(frame: FrameType | None) -> bool:
    """Whether another echo is being collected, where nothing can be raised."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        # What collects gives it the dead reference; whoever calls it gives nothing.
        if frame.f_code is _FINALIZE and frame.f_locals["_"] is not None:
            return True
        frame = frame.f_back
    return False


def _is_spared(code: CodeType, offset: int) -> bool:
    """Whether a signal could not raise here, or a tracer cannot as a signal would."""
    following = (each for each in dis.get_instructions(code) if each.offset >= offset)
    first, *later = islice(following, 4)
    # Python 3.12 lets what a tracer raises where a comprehension goes on to its next
    # element pass by the clauses of its function.
    if first.opname == "FOR_ITER":
        return True
    # The line of a ``with`` is run for the second time, to end its block.
    loads = [each for each in (first, *later) if each.opname == "LOAD_CONST"]
    return [each.argval for each in loads] == [None] * 3
