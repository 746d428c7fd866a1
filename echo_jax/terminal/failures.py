"""Reports the failure of a command: one sentence, and a traceback only on request."""

import contextlib
import errno
import gc
import logging
import math
import os
import re
import resource
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_OUTPUT = 1  # the descriptor
_FULL = (errno.ENOSPC, errno.EDQUOT)
# System errors that libraries report only in words.
_IN_WORDS = (*_FULL, errno.EFBIG, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE)
_FIXES = {
    errno.ENOENT: "name one that is there",
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR), "name another path"),
    errno.EACCES: "change its permissions, or name another path",
    errno.EPERM: "change its permissions, or name another path",
    errno.EROFS: "name a path that can be written",
    errno.EFBIG: "raise the limit of 'ulimit -f'",
    errno.EMFILE: "raise the limit of {files} open files by 'ulimit -n 65536'",
    errno.ENFILE: "end other programs, or raise fs.file-max of the machine",
    errno.EIO: "the disk, or the way to it, fails: look at the system's log",
}
_OF_THE_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM)
_QUOTED_FILE = re.compile(r'"(/[^"]+)"|(?:writing|opening) ([^;\n]+)(?:;|$)')
# Grain's message when a reader process has died.
_DEAD_WORKER = re.compile(r"Worker process was terminated .* exit code (-?\d+)")
_FILES = resource.RLIMIT_NOFILE
# Where worker processes put their batches.
_SHARED = "/dev/shm"
_SHARED_IS_FULL = (
    f"the shared memory of worker processes, {_SHARED}, is full; lower "
    "--config.data.workers or --config.batch_size, or make it larger, in a container "
    "with --shm-size=8g; the same command goes on from what is saved"
)
_SHARED_RESERVE_BYTES = 16 * 1024**2
# Grain adds a paragraph about its own frames to every error message.
_ADDED = "\n--------------------\n"


def status_of(error: BaseException) -> int:
    """Returns the exit status: 2 for a wrong command line, 1 for a failure."""
    is_typed = isinstance(error, OSError) and error.errno in _OF_THE_PATH
    return 2 if is_typed or _of_starting_jax(error) else 1


def sentence(error: BaseException) -> str:
    """Returns a sentence about the failure and what to do."""
    said = str(error).partition(_ADDED)[0]
    kind = type(error).__name__
    is_of_system = isinstance(error, OSError) and error.errno is not None
    if not is_of_system and _is_ours(error):
        return said
    if of_jax := _of_starting_jax(error):
        return of_jax
    for each in _with_causes(error):
        if (of_system := _of_system(each)) is not None:
            return of_system
    if dead := _DEAD_WORKER.search(said):
        return _of_worker(int(dead[1]))
    if kind in ("JaxRuntimeError", "XlaRuntimeError"):
        return _of_devices(said.partition("\n")[0])
    if isinstance(error, MemoryError):
        return (
            f"the memory of this machine is used up ({said or kind}); lower "
            "--config.batch_size, --config.echo.buffer or --config.data.prefetch"
        )
    first = said.strip().partition("\n")[0]
    return (
        f"unexpected {kind}{first and ': '}{first}; this may be a bug: run it again "
        "with --debug, and report what it prints"
    )


def _with_causes(error: BaseException) -> list[BaseException]:
    found = [error]
    while (cause := found[-1].__cause__ or found[-1].__context__) not in (None, *found):
        found.append(cause)
    return found


def _of_system(error: BaseException) -> str | None:
    """Returns the operation that the system refused, or None for other errors."""
    words = str(error)
    if isinstance(error, OSError) and error.errno is not None:
        number, file, what = error.errno, error.filename, error.strerror
    elif found := [each for each in _IN_WORDS if os.strerror(each) in words]:
        number, file, what = found[0], None, os.strerror(found[0])
    else:
        return None
    if file is None and (quoted := _QUOTED_FILE.findall(words)):
        # The last quoted path is the original; a checkpoint is named as a whole.
        file = "".join(quoted[-1]).partition(".orbax-checkpoint-tmp")[0]
    name = "a file" if file is None else os.fsdecode(file)
    if number not in _FULL:
        fix = _FIXES.get(number, "").format(files=resource.getrlimit(_FILES)[0])
        return "; ".join(filter(None, (f"{name}: {what}", fix)))
    is_shared = file is None and _free_bytes(_SHARED) < _SHARED_RESERVE_BYTES
    if is_shared or name.startswith("/psm_"):
        return _SHARED_IS_FULL
    if file is not None:
        folders = map(_free_bytes, Path(name).absolute().parents)
        free = next(filter(math.isfinite, folders), 0.0)
        what = f"{what} ({free / 1e6:.1f} MB are free there)"
    elif os.path.isfile(_OUTPUT) and not _free_bytes(_OUTPUT):
        name = "the file of standard output"
    return (
        f"{name} cannot be written: {what}; free some, and the same command goes on "
        "from what is whole"
    )


def _free_bytes(place: Path | str | int) -> float:
    """Returns the free bytes of a place's disk; infinity if there is no such place."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(place).free
    return math.inf


def _of_worker(status: int) -> str:
    # The kernel sends SIGBUS to who writes to memory that it cannot give.
    if -status == signal.SIGBUS:
        return _SHARED_IS_FULL
    with contextlib.suppress(ValueError):
        how = f"was killed by {signal.Signals(-status).name}"
        return (
            f"a worker that reads the data {how}; if memory was used up, lower "
            "--config.data.workers; the same command goes on from what is saved"
        )
    return (
        f"a worker that reads the data ended with exit status {status}; the same "
        "command goes on from what is saved, with --config.data.workers=0 without "
        "workers"
    )


def _of_devices(said: str) -> str:
    fix = "run it again with --debug for the traceback"
    if "RESOURCE_EXHAUSTED" in said or "out of memory" in said.lower():
        fix = (
            "it does not fit into the devices' memory; lower --config.batch_size, or "
            "--config.echo.buffer where the echo is on the devices"
        )
    return f"the devices failed: {said}; {fix}"


def _of_starting_jax(error: BaseException) -> str | None:
    """Returns the reason why jax cannot be imported or has no devices, or None."""
    said = str(error).strip().partition("\n")[0]
    frames = traceback.extract_tb(error.__traceback__)
    imported = [frame.filename for frame in frames if frame.name == "<module>"]
    if any("/jax/_src/" in file for file in imported):
        return f"jax cannot be imported: {said}; correct that, and run it again"
    jax = sys.modules.get("jax")
    if jax and not said and isinstance(error, AssertionError):
        # jax fails so, without a message, where JAX_PLATFORMS=cuda finds no GPU.
        try:
            jax.devices()
        except AssertionError:
            platforms = jax.config.jax_platforms
            said = f"JAX_PLATFORMS={platforms} asks for devices that are not here"
    elif said.startswith("Unable to initialize backend"):
        said = said.partition(" (set JAX_PLATFORMS")[0].rstrip(".")
    else:
        return None
    fix = "unset JAX_PLATFORMS, or set JAX_PLATFORMS=cpu to run on the CPUs"
    return f"jax finds no devices: {said}; {fix}" if said else None


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
