"""Reports the failure of a command: one sentence, and a traceback only on request."""

import contextlib
import errno
import gc
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# Errors of what a user typed, and not of the run.
_TYPED = (errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
_TYPED += (errno.EACCES, errno.EPERM)
_GOES_ON = "the same command goes on from what is saved"
_NO_DEVICES = "unset JAX_PLATFORMS, or set JAX_PLATFORMS=cpu to run on the CPUs"
# Words of failures, also of those that libraries report only in words, and the fix.
_FIXES = {
    r"/psm_|exit code -7\b": "the shared memory of worker processes, /dev/shm, is "
    "full; lower --config.data.workers or --config.batch_size, or make it larger, in a "
    f"container with --shm-size=8g; {_GOES_ON}",
    r"No space left|quota exceeded": f"free some space, and {_GOES_ON}",
    r"Too many open files": "raise the limit by 'ulimit -n 65536'",
    r"File too large": "raise the limit of 'ulimit -f'",
    r"Read-only file system|[Pp]ermission denied|not permitted": "change the "
    "permissions, or name another path",
    r"No such file|File exists|(Is|Not) a directory": "name another path",
    r"Input/output error": "the disk, or the way to it, fails: look at the system's "
    "log",
    r"Gloo|NCCL|coordination service": "another process of the run, or the way to it, "
    f"is lost; {_GOES_ON}",
    r"Worker process was terminated": "a worker that reads the data was killed; if "
    f"memory was used up, lower --config.data.workers; {_GOES_ON}",
    r"RESOURCE_EXHAUSTED|[Oo]ut of memory|MemoryError": "lower --config.batch_size, "
    "--config.echo.buffer or --config.data.prefetch",
    r"Unable to initialize backend|asks for devices": _NO_DEVICES,
}
# Grain adds a paragraph about its own frames to every error message.
_ADDED = "\n--------------------\n"


def status_of(error: BaseException) -> int:
    """Returns the exit status: 2 for a wrong command line, 1 for a failure."""
    is_typed = isinstance(error, OSError) and error.errno in _TYPED
    return 2 if is_typed or _NO_DEVICES in sentence(error) else 1


def sentence(error: BaseException) -> str:
    """Returns a sentence about the failure and what to do."""
    is_of_system = isinstance(error, OSError) and error.errno is not None
    if not is_of_system and _is_ours(error):
        return str(error).partition(_ADDED)[0]
    for each in _with_causes(error):
        said = _said(each)
        for words, fix in _FIXES.items():
            if re.search(words, said):
                return f"{said}; {fix}"
    if is_of_system:
        return _said(error)
    return (
        f"unexpected {_said(error)}; this may be a bug: run it again with --debug for "
        "the traceback"
    )


def _said(error: BaseException) -> str:
    """Returns the first line of an error, after the file or the kind."""
    said = str(error).partition(_ADDED)[0].strip()
    if isinstance(error, OSError) and error.strerror:
        return f"{os.fsdecode(error.filename or 'a file')}: {error.strerror}"
    if isinstance(error, AssertionError) and not said and "jax" in sys.modules:
        # jax fails so, without a message, where JAX_PLATFORMS=cuda finds no GPU.
        platforms = sys.modules["jax"].config.jax_platforms
        return f"JAX_PLATFORMS={platforms} asks for devices that are not here"
    first = said.partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _with_causes(error: BaseException) -> list[BaseException]:
    found = [error]
    while (cause := found[-1].__cause__ or found[-1].__context__) not in (None, *found):
        found.append(cause)
    return found


def _is_ours(error: BaseException) -> bool:
    if type(error).__module__.partition(".")[0] == _PACKAGE.name:
        return True
    # This also works for an error from another process, whose frames are copies.
    frames = traceback.extract_tb(error.__traceback__)
    kinds = (ValueError, RuntimeError, OSError, ImportError)
    if not frames or not isinstance(error, kinds):
        return False
    last = frames[-1]
    # An error from a C library ends in the line that called the library.
    says_raise = (last.line or "").startswith("raise ")
    return says_raise and Path(last.filename).is_relative_to(_PACKAGE)


# Threads of Orbax and TensorStore print pages of errors, and so do objects of a failed
# save when they are collected. The error of the command is enough.
@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppresses tracebacks that libraries print on standard error by themselves."""

    def has_no_traceback(record: logging.LogRecord) -> bool:
        return not record.exc_info

    before = sys.excepthook, threading.excepthook, sys.unraisablehook
    loggers = [*map(logging.getLogger, ("absl", "asyncio", "concurrent.futures"))]
    for logger in loggers:
        logger.addFilter(has_no_traceback)
    # TensorFlow logs the traceback of every failed Python call.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.excepthook = threading.excepthook = sys.unraisablehook = lambda *_: None
    try:
        yield
    finally:
        sys.excepthook, threading.excepthook, sys.unraisablehook = before
        for logger in loggers:
            logger.removeFilter(has_no_traceback)


def forget(error: BaseException) -> None:
    """Releases the objects that an error keeps alive, now and without messages."""
    for each in _with_causes(error):
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = each.__cause__ = each.__context__ = None
    gc.collect()
