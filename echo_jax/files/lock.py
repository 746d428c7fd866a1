"""Locks a folder for one writer at a time; other processes are refused.

A lock is a file of one line in the folder; it names its owner.

- On a disk the owner holds a ``flock`` of it. The kernel frees it when the process
  ends, however it ends, so a line that is left behind blocks nobody.
- In a bucket the owner writes it again every 10 seconds. A process that finds it
  watches for a minute whether its generation changes, then takes over an unchanged
  lock. It compares generations that it has seen, never a time with its own clock.

An owner whose lock was removed or taken over detects this at a later
`FolderLock.check`, and stops.
"""

import contextlib
import errno
import os
import platform
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Self

from filelock import FileLock, Timeout

from echo_jax.files.folders import FolderError, RunPath
from echo_jax.terminal.countdown import Countdown

# These cannot be names of arms, which begin with a letter or a digit.
LOCK_NAME = ".lock"
# The lock of a report's files: a report is possible while a run trains in the folder.
REPORT_LOCK_NAME = ".report.lock"
_RENEW_EVERY_S = 10
_LOOK_EVERY_S = 1
# The number of checks after which an unchanged lock in a bucket is taken over.
_SILENT_LOOKS = 60
_TIMEOUT_S = 20
_LINE_EVERY_S = 10.0
_NO_LOCKS = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}

# A lock may come from a stranger: only text of these forms is shown.
_MAX_BYTES = 1024
_OWNER = re.compile(
    rb"host=([\w.-]{1,255}) pid=([1-9]\d{0,8}) "
    rb"since=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ) [ \w=]{0,200}\n"
)


class FolderInUseError(FolderError):
    """Another process has the folder; the message says which, and what to do."""


class _OnDisk:
    """A lock file that the kernel frees; nobody waits for it."""

    waiting = "", 0.0

    def __init__(self, path: RunPath, line: bytes):
        self._path, self._line = path, line
        self._made: list[str] = []
        self._lock = FileLock(
            path, timeout=0, thread_local=False, on_acquired=self._write
        )

    def take(self) -> bool:
        # Before filelock opens it: this refuses links and other files.
        _owner(self._path, self._read())
        self._made = _missing(self._path.parent)
        self._path.parent.mkdir()
        try:
            self._lock.acquire()
        except Timeout:
            raise _in_use(self._path, self._read()) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise FolderError(
                f"{self._path} cannot be locked ({error.strerror}): the disk has no "
                "flock; mount it with flock, or name a folder on another disk"
            ) from error
        return True

    def renew(self) -> str:
        return _loss(self._path, self._read(), self._line)

    def release(self) -> None:
        with contextlib.suppress(OSError):
            if self._read() == self._line:
                with self._path.open_parent() as parent:
                    os.unlink(self._path.name, dir_fd=parent)
        self._lock.release()
        with contextlib.suppress(OSError):
            for folder in self._made:
                os.rmdir(folder)

    def _read(self) -> bytes | None:
        try:
            with self._path.open_file() as file:
                return file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return None

    def _write(self, opened: int) -> None:
        os.ftruncate(opened, 0)
        os.pwrite(opened, self._line, 0)


class _InBucket:
    """An object that its owner renews."""

    def __init__(self, path: RunPath, line: bytes):
        from google.api_core import exceptions
        from google.auth.exceptions import GoogleAuthError
        from google.cloud import storage
        from google.cloud.storage.retry import DEFAULT_RETRY

        self._failed = exceptions.GoogleAPIError, GoogleAuthError
        self._late = exceptions.NotFound, exceptions.PreconditionFailed
        self._path, self._line = path, line
        self._generation, self._looks = 0, 0
        self.waiting: tuple[str, float] = f"waiting for {path.parent}", 0.0
        bucket, _, self._name = os.fspath(path).removeprefix("gs://").partition("/")
        client: Any = storage.Client()  # Its types forbid the documented None.
        self._bucket = client.bucket(bucket)
        # All requests name a generation, so that they can be repeated.
        retry = DEFAULT_RETRY.with_timeout(_TIMEOUT_S)
        self._patience = {"timeout": _TIMEOUT_S, "retry": retry}

    def take(self) -> bool:
        # At first where no lock exists, at last in place of an unchanged one.
        if self._looks in (0, _SILENT_LOOKS) and self._write():
            return True
        before, found = self._generation, self._read()
        if found is None or found == self._line:  # It was removed, or is ours.
            self._looks = 0
            return found is not None
        if self._looks and self._generation != before:
            raise _in_use(self._path, found)
        owner = _owner(self._path, found)
        what = f"looking whether {self._path.parent} is still in use by {owner}"
        self.waiting = what, self._looks / _SILENT_LOOKS
        self._looks += 1
        return False

    def renew(self) -> str:
        return "" if self._write() else _loss(self._path, self._read(), self._line)

    def release(self) -> None:
        if self._read() == self._line:
            with self._errors(), contextlib.suppress(*self._late):
                self._bucket.blob(self._name).delete(
                    if_generation_match=self._generation, **self._patience
                )

    def _read(self) -> bytes | None:
        with self._errors():
            while blob := self._bucket.get_blob(self._name, **self._patience):
                self._generation = blob.generation
                # It may have just changed.
                with contextlib.suppress(*self._late):
                    return blob.download_as_bytes(
                        end=_MAX_BYTES,
                        if_generation_match=self._generation,
                        **self._patience,
                    )
            self._generation = 0
            return None

    def _write(self) -> bool:
        blob = self._bucket.blob(self._name)
        with self._errors(), contextlib.suppress(*self._late):
            blob.upload_from_string(
                self._line, if_generation_match=self._generation, **self._patience
            )
            self._generation = blob.generation
            return True
        return False

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._failed as error:
            raise FolderError(f"{self._path} cannot be used: {error}") from error


# The lock makes missing folders, and removes them at the end if they are still empty.
# `on_wait` gets a text and the fraction of the waiting time; by default it prints.
class FolderLock:
    """Locks all of the folders or none, from entry to exit."""

    def __init__(
        self,
        *folders: RunPath,
        name: str = LOCK_NAME,
        on_wait: Callable[[str, float], None] | None = None,
    ):
        self._paths = [folder / name for folder in folders]
        self._on_wait = on_wait
        self._locks: list[_OnDisk | _InBucket] = []
        self._owned: list[_OnDisk | _InBucket] = []
        self._lost = ""
        self._renewing = threading.Lock()
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        host = re.sub(r"[^A-Za-z0-9_.-]", "_", platform.node())[:255] or "localhost"
        since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        token = secrets.token_hex(16)
        line = f"host={host} pid={os.getpid()} since={since} token={token}\n".encode()
        self._renewed_s = time.monotonic()
        self._thread = threading.Thread(target=self._keep_renewing, daemon=True)
        try:
            for path in self._paths:
                kind = _InBucket if path.in_bucket else _OnDisk
                self._locks.append(kind(path, line))
            if self._paths:
                self._thread.start()
                self._take_all()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._release()

    def check(self) -> None:
        """Raises FolderInUseError if this process has lost a folder; cheap."""
        if time.monotonic() > self._renewed_s + 3 * _RENEW_EVERY_S:
            self._renew()  # The thread of a continued process may run later than this.
        if self._lost:
            raise FolderInUseError(self._lost)

    def _take_all(self) -> None:
        with contextlib.ExitStack() as stack:
            show = self._on_wait
            # In turns: all folders share one minute of waiting.
            waiting = self._locks
            while waiting := [lock for lock in waiting if not self._take(lock)]:
                if show is None:
                    countdown = Countdown(line_every_s=_LINE_EVERY_S)
                    show = stack.enter_context(countdown).show
                show(*waiting[0].waiting)
                time.sleep(_LOOK_EVERY_S)

    def _take(self, lock: _OnDisk | _InBucket) -> bool:
        is_taken = lock.take()
        if is_taken:
            self._owned.append(lock)
        return is_taken

    def _keep_renewing(self) -> None:
        while not self._is_over.wait(_RENEW_EVERY_S):
            self._renew()

    def _renew(self) -> None:
        """Shows others that this process lives, and checks that it still owns."""
        with self._renewing:
            self._renewed_s = time.monotonic()
            for lock in self._owned:
                # The next try may succeed where this one fails; other writes to such a
                # disk or bucket fail by themselves.
                with contextlib.suppress(OSError):
                    self._lost = self._lost or lock.renew()

    def _release(self) -> None:
        self._is_over.set()
        if self._thread.ident:
            self._thread.join()
        # A folder that was removed in the meantime stays removed.
        for lock in reversed(self._locks):
            with contextlib.suppress(OSError):
                lock.release()


def _owner(path: RunPath, found: bytes | None) -> str:
    """Says whose lock this is; refuses content that `FolderLock` has not written."""
    if not found:
        return "another process"
    match = _OWNER.fullmatch(found)
    if match is None:
        raise FolderError(
            f"{path} is no lock that echo_jax has written; remove it if nothing uses "
            "the folder"
        )
    host, pid, since = (field.decode() for field in match.groups())
    return f"process {pid} on {host}, since {since}"


def _in_use(path: RunPath, found: bytes | None) -> FolderInUseError:
    return FolderInUseError(
        f"{path.parent} is in use by {_owner(path, found)}; wait until that ends, or "
        "stop it, or name another folder"
    )


def _loss(path: RunPath, found: bytes | None, line: bytes) -> str:
    """Says how the owner of a line has lost its lock; empty if it still owns it."""
    if found == line:
        return ""
    if found is None:
        return f"the lock of {path.parent} was removed, so this process stops"
    return f"{path.parent} was taken over by {_owner(path, found)}, so this one stops"


def _missing(folder: RunPath) -> list[str]:
    """Returns the folders that `RunPath.mkdir` would make, the innermost first."""
    missing: list[str] = []
    path = os.path.abspath(folder)
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing
