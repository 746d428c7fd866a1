"""Small files with compare-and-swap: a change applies only to the version read before.

`echo_jax.files.lock` needs only this from a disk or a bucket. A change that comes too
late does nothing; its process reads again and sees the other change.

On a disk, a new file is linked into its place, which fails if a file exists, also on
NFS. An old file is replaced or removed under a short ``flock``: two processes of a host
never replace each other's file. Some disks lack hard links or ``flock``; there a
process waits a moment and reads again.

In a bucket, every write names the generation that it replaces.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from echo_jax.files.folders import FolderError, RunPath

__all__ = ["BucketFile", "DiskFile", "Found", "lock_file"]

_MAX_BYTES = 1024  # `echo_jax.files.lock` writes only smaller files.
_TIMEOUT_S = 20
# The errors of disks without hard links or flock.
_NOT_HERE = {
    errno.EINVAL,
    errno.EMLINK,
    errno.ENOLCK,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EPERM,
}


@dataclass(frozen=True)
class Found:
    """Content that was read, and its version, which changes with every write."""

    content: bytes
    version: int


# `is_exact` is False where the disk lacks hard links or flock. Then several
# simultaneous writers may each find their own content.
class DiskFile:
    """A file on a disk, perhaps a shared one."""

    def __init__(self, path: RunPath):
        self._path = path
        self.is_exact = True

    def read(self) -> Found | None:
        try:
            with self._opened(os.O_RDONLY) as (_, opened):
                return self._read(opened)
        except FileNotFoundError:
            return None

    def create(self, content: bytes) -> None:
        """Writes the file, unless it exists."""
        try:
            self._path.write(content, is_new=True)
        except (FileExistsError, FileNotFoundError):
            pass  # Another process was first or removed the folder.
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            self.is_exact = False
            self._path.write(content)

    def replace(self, found: Found, content: bytes) -> None:
        """Writes content in place of the version that was found."""
        with self._if_still(found) as parent:
            if parent is not None:
                self._path.write(content)

    def touch(self, found: Found) -> None:
        """Makes a new version of the content that was found."""
        with self._if_still(found) as parent:
            if parent is not None:
                os.utime(self._path.name, dir_fd=parent, follow_symlinks=False)

    def remove(self, found: Found) -> None:
        with self._if_still(found) as parent:
            if parent is not None:
                os.unlink(self._path.name, dir_fd=parent)

    @contextlib.contextmanager
    def _if_still(self, found: Found) -> Iterator[int | None]:
        """Yields the locked parent's descriptor, or None if the file has changed."""
        with contextlib.ExitStack() as stack:
            still = None
            with contextlib.suppress(FileNotFoundError):
                parent, opened = stack.enter_context(self._opened(os.O_RDWR))
                if self._lock(opened) and self._read(opened) == found:
                    name = self._path.name
                    there = os.stat(name, dir_fd=parent, follow_symlinks=False)
                    if os.path.samestat(os.fstat(opened), there):
                        still = parent
            yield still

    def _lock(self, opened: int) -> bool:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            self.is_exact = False
        return True

    @contextlib.contextmanager
    def _opened(self, flags: int) -> Iterator[tuple[int, int]]:
        with self._path.open_parent() as parent:
            # Non-blocking, because a named pipe would block forever.
            opened = self._path.open_in(parent, flags | os.O_NONBLOCK)
            try:
                yield parent, opened
            finally:
                os.close(opened)

    def _read(self, opened: int) -> Found:
        content = os.pread(opened, _MAX_BYTES + 1, 0)
        _refuse_large(self._path, len(content))
        return Found(content, os.fstat(opened).st_mtime_ns)


class BucketFile:
    """An object in a bucket; every version of it is a generation."""

    is_exact = True

    def __init__(self, path: RunPath):
        from google.api_core import exceptions
        from google.auth.exceptions import GoogleAuthError
        from google.cloud import storage
        from google.cloud.storage.retry import DEFAULT_RETRY

        self._failed = exceptions.GoogleAPIError, GoogleAuthError
        self._late = exceptions.NotFound, exceptions.PreconditionFailed

        self._path = path
        bucket, _, self._name = os.fspath(path).removeprefix("gs://").partition("/")
        client: Any = storage.Client()  # Its types forbid the documented None.
        self._bucket = client.bucket(bucket)
        # All requests name a generation, so that they can be repeated.
        retry = DEFAULT_RETRY.with_timeout(_TIMEOUT_S)
        self._patience = {"timeout": _TIMEOUT_S, "retry": retry}

    def read(self) -> Found | None:
        with self._errors():
            while blob := self._bucket.get_blob(self._name, **self._patience):
                _refuse_large(self._path, blob.size)
                generation = blob.generation
                try:
                    content = blob.download_as_bytes(
                        if_generation_match=generation, **self._patience
                    )
                    return Found(content, generation)
                except self._late:
                    pass  # It has just changed.
            return None

    def create(self, content: bytes) -> None:
        self._write(content, 0)

    def replace(self, found: Found, content: bytes) -> None:
        self._write(content, found.version)

    def touch(self, found: Found) -> None:
        self._write(found.content, found.version)

    def remove(self, found: Found) -> None:
        with self._errors(), contextlib.suppress(*self._late):
            self._bucket.blob(self._name).delete(
                if_generation_match=found.version, **self._patience
            )

    def _write(self, content: bytes, generation: int) -> None:
        with self._errors(), contextlib.suppress(self._late[1]):
            self._bucket.blob(self._name).upload_from_string(
                content, if_generation_match=generation, **self._patience
            )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._failed as error:
            raise FolderError(f"{self._path} cannot be used: {error}") from error


def lock_file(path: RunPath) -> DiskFile | BucketFile:
    return BucketFile(path) if path.in_bucket else DiskFile(path)


def _refuse_large(path: RunPath, size: int) -> None:
    if size > _MAX_BYTES:
        raise FolderError(
            f"{path} has more than {_MAX_BYTES} bytes, so echo_jax has not written it; "
            "remove it if nothing uses the folder"
        )
