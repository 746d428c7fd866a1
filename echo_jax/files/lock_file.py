"""Small files that change only from what a process has just read: compare-and-swap.

`echo_jax.files.lock` needs no more of a disk or a bucket than this. A change that comes
too late does nothing; whoever made it reads again, and sees.

On a disk a new file is linked into its place, which fails where one is, on NFS too. An
old one is replaced or removed by who holds ``flock`` on it, for no longer than that: so
two processes of a host never replace each other's. Disks without hard links or
``flock`` exist; there a process has to wait a moment and read again.
In a bucket every write names the generation that it replaces.
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

_MAX_BYTES = 1024  # A larger file is nothing that `echo_jax.files.lock` has written.
_TIMEOUT_S = 20
# What disks say to a hard link, or to flock, that they do not have.
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
    """What was read.

    Attributes:
      content: All of it.
      version: Another one after every change, also if the content is the same.
    """

    content: bytes
    version: int


class DiskFile:
    """A file on a disk, perhaps a shared one.

    Attributes:
      is_exact: Whether of several processes that change it at once one alone will
        find its content there: false where the disk could not do what that takes.
    """

    def __init__(self, path: RunPath):
        self._path = path
        self.is_exact = True

    def read(self) -> Found | None:
        """Reads the file; None if there is none.

        Raises:
          FolderError: It is no regular file, or too large.
        """
        try:
            with self._opened(os.O_RDONLY) as (_, opened):
                return self._read(opened)
        except FileNotFoundError:
            return None

    def create(self, content: bytes) -> None:
        """Writes the file, unless there is one."""
        try:
            self._path.write(content, is_new=True)
        except (FileExistsError, FileNotFoundError):
            pass  # Another process was first, or has removed the folder.
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            self.is_exact = False
            self._path.write(content)

    def replace(self, found: Found, content: bytes) -> None:
        """Writes other content in place of what was found."""
        with self._if_still(found) as parent:
            if parent is not None:
                self._path.write(content)

    def touch(self, found: Found) -> None:
        """Makes what was found a new version."""
        with self._if_still(found) as parent:
            if parent is not None:
                os.utime(self._path.name, dir_fd=parent, follow_symlinks=False)

    def remove(self, found: Found) -> None:
        """Removes what was found."""
        with self._if_still(found) as parent:
            if parent is not None:
                os.unlink(self._path.name, dir_fd=parent)

    @contextlib.contextmanager
    def _if_still(self, found: Found) -> Iterator[int | None]:
        """Keeps others from changing what was found; gives None if one just has."""
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
            # Without waiting, since a named pipe would wait for ever.
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
        from google.cloud import storage
        from google.cloud.storage.retry import DEFAULT_RETRY

        self._path = path
        bucket, _, self._name = os.fspath(path).removeprefix("gs://").partition("/")
        client: Any = storage.Client()  # Its types forbid None, which it documents.
        self._bucket = client.bucket(bucket)
        # All requests name a generation, so that one may be sent again.
        retry = DEFAULT_RETRY.with_timeout(_TIMEOUT_S)
        self._patience = {"timeout": _TIMEOUT_S, "retry": retry}

    def read(self) -> Found | None:
        """Reads the object; see `DiskFile.read`."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        with self._errors():
            while blob := self._bucket.get_blob(self._name, **self._patience):
                _refuse_large(self._path, blob.size)
                generation = blob.generation
                try:
                    content = blob.download_as_bytes(
                        if_generation_match=generation, **self._patience
                    )
                    return Found(content, generation)
                except (NotFound, PreconditionFailed):
                    pass  # It has just changed.
            return None

    def create(self, content: bytes) -> None:
        """Writes the object, unless there is one."""
        self._write(content, 0)

    def replace(self, found: Found, content: bytes) -> None:
        """Writes other content in place of what was found."""
        self._write(content, found.version)

    def touch(self, found: Found) -> None:
        """Makes what was found a new version."""
        self._write(found.content, found.version)

    def remove(self, found: Found) -> None:
        """Removes what was found."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        with self._errors(), contextlib.suppress(NotFound, PreconditionFailed):
            self._bucket.blob(self._name).delete(
                if_generation_match=found.version, **self._patience
            )

    def _write(self, content: bytes, generation: int) -> None:
        from google.api_core.exceptions import PreconditionFailed

        with self._errors(), contextlib.suppress(PreconditionFailed):
            self._bucket.blob(self._name).upload_from_string(
                content, if_generation_match=generation, **self._patience
            )

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError

        try:
            yield
        except (GoogleAPIError, GoogleAuthError) as error:
            raise FolderError(f"{self._path} cannot be used: {error}") from error


def lock_file(path: RunPath) -> DiskFile | BucketFile:
    """Returns the file of a path, which need not exist yet."""
    return BucketFile(path) if path.in_bucket else DiskFile(path)


def _refuse_large(path: RunPath, size: int) -> None:
    if size > _MAX_BYTES:
        raise FolderError(
            f"{path} has more than {_MAX_BYTES} bytes, so echo_jax has not written it; "
            "remove it if nothing uses the folder"
        )
