"""Locks a folder for one writer at a time; other processes are refused.

A lock is a file of one line in the folder, which names its owner.

- On a disk the owner holds a lock of the kernel, which ends with the process.
- In a bucket the owner writes the file again every 10 seconds. A process that finds it
  waits for a minute, and takes over a lock that nobody has written in that time.
"""

import contextlib
import errno
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

from etils import epath
from filelock import FileLock, Timeout

from echo_jax.files.folders import TIMEOUT_S, FolderError, is_in_bucket
from echo_jax.terminal.notes import Notes
from echo_jax.terminal.printable import printable

LOCK_NAME = ".lock"
# The lock of a report's files: a report is possible while a run trains in the folder.
REPORT_LOCK_NAME = ".report.lock"
_RENEW_EVERY_S = 10
# How often an owner must have been silent before its lock in a bucket is taken over.
_SILENT_TIMES = 6
_NO_LOCKS = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}
_MOST_SHOWN = 200


class FolderInUseError(FolderError):
    """Another process has the folder; the message says which, and what to do."""

    def __init__(self, path: epath.Path, owner: bytes):
        super().__init__(
            f"{path.parent} is in use by {_shown(owner) or 'another'}; wait until that "
            "ends, or stop it, or name another folder"
        )


def _shown(owner: bytes) -> str:
    """Returns the line of a lock without the part that makes it unique."""
    line = owner[:_MOST_SHOWN].decode(errors="replace")
    return printable(line.partition("\n")[0])


# The lock makes missing folders.
class FolderLock:
    """Locks all of the folders or none, from entry to exit."""

    def __init__(self, *folders: epath.Path, name: str = LOCK_NAME):
        self._paths = [folder / name for folder in folders]
        self._objects: list[_Object] = []
        self._lost: FolderInUseError | None = None
        self._is_over = threading.Event()
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        line = f"process {os.getpid()} on {platform.node()}, since {since}\n"
        # Unique, so that an owner in a bucket knows its line.
        line += f"{secrets.token_hex(8)}\n"
        with contextlib.ExitStack() as held:
            for path in self._paths:
                if is_in_bucket(path):
                    self._objects.append(_Object(path, line))
                else:
                    held.enter_context(_held_on_disk(path, line))
            for each in self._objects:
                held.callback(each.remove)
            _take(self._objects)
            self._renewed_s = time.monotonic()
            if self._objects:
                thread = threading.Thread(target=self._keep_renewing, daemon=True)
                thread.start()
                held.callback(thread.join)
                held.callback(self._is_over.set)
            self._held = held.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def check(self) -> None:
        """Raises FolderInUseError if another process has taken over a folder; cheap."""
        if self._objects and time.monotonic() > self._renewed_s + 3 * _RENEW_EVERY_S:
            self._renew()  # The thread of a continued process may run later than this.
        if self._lost is not None:
            raise self._lost

    def _keep_renewing(self) -> None:
        while not self._is_over.wait(_RENEW_EVERY_S):
            self._renew()

    def _renew(self) -> None:
        self._renewed_s = time.monotonic()
        for each in self._objects if self._lost is None else ():
            # The next try may succeed where this one fails.
            with contextlib.suppress(OSError):
                if not each.write():
                    self._lost = FolderInUseError(each.path, each.owner)


@contextlib.contextmanager
def _held_on_disk(path: epath.Path, line: str) -> Iterator[None]:
    def write(opened: int) -> None:
        os.ftruncate(opened, 0)
        os.pwrite(opened, line.encode(), 0)

    is_new = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0, thread_local=False, on_acquired=write)
    try:
        lock.acquire()
    except Timeout:
        owner = b""
        with contextlib.suppress(FileNotFoundError):  # The owner has just ended.
            owner = path.read_bytes()[:_MOST_SHOWN]
        raise FolderInUseError(path, owner) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise FolderError(
            f"{path} cannot be locked ({error.strerror}): the disk has no flock; mount "
            "it with flock, or name a folder on another disk"
        ) from error
    try:
        yield
    finally:
        # Before the release: filelock does not take a file that was removed.
        path.unlink(missing_ok=True)
        lock.release()
        if is_new:  # It goes again if nothing was written into it.
            with contextlib.suppress(OSError):
                os.rmdir(path.parent)


def _take(objects: "Sequence[_Object]") -> None:
    """Writes all objects; waits where another process may own one."""
    owned = [each for each in objects if each.look()]
    if owned:
        first = owned[0]
        what = f"{first.path.parent} is still in use by {_shown(first.owner)}"
        with Notes().slow(f"looking whether {what}"):
            for _ in range(_SILENT_TIMES):
                time.sleep(_RENEW_EVERY_S)
                for each in owned:
                    before = each.generation
                    if each.look() and each.generation != before:
                        raise FolderInUseError(each.path, each.owner)
    for each in objects:
        if not each.write():
            raise FolderInUseError(each.path, each.owner)


class _Object:
    """A lock in a bucket: only who knows its generation can write it."""

    def __init__(self, path: epath.Path, line: str):
        from tensorstore import KvStore

        self.path, self._line = path, line.encode()
        self.owner, self.generation = b"", b""
        self._store = self._result(KvStore.open(os.fspath(path)))

    def look(self) -> bytes:
        """Reads the owner and the generation; returns the owner, empty without one."""
        found = self._result(self._store.read(""))
        self.owner, self.generation = found.value, found.stamp.generation
        return self.owner

    def write(self) -> bool:
        """Writes the line; returns False if another process has written since."""
        found = self._store.write("", self._line, if_equal=self.generation)
        if written := self._result(found).generation:
            self.generation = written
            return True
        # TensorStore repeats a request whose answer was lost.
        return self.look() == self._line

    def remove(self) -> None:
        with contextlib.suppress(FolderError):
            if self.look() == self._line:
                self._result(self._store.write("", None, if_equal=self.generation))

    def _result(self, future: Any) -> Any:
        try:
            return future.result(TIMEOUT_S)
        except (OSError, RuntimeError, ValueError) as error:
            said = str(error) or f"it did not answer for {TIMEOUT_S} s"
            raise FolderError(f"{self.path} cannot be used: {said}") from error
