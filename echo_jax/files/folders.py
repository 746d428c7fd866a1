"""Run folders: on a file system, or in a bucket of Google Cloud Storage.

The one place where a run folder is opened and where its small files are read and
written; Orbax writes the checkpoints. A run folder may come from a stranger, so nothing
in it is followed: every name below the folder that the user gave is opened relative to
the one above it, links are refused, and what is read is a regular file of a bounded
size. The path to the folder itself is the user's own, and may have links in it.
"""

import contextlib
import functools
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast

from echo_jax.files.bucket import BucketError, is_in_bucket, open_bucket, write_object

if TYPE_CHECKING:
    from etils import epath

__all__ = [
    "FolderError",
    "RunPath",
    "is_unfinished",
    "run_file",
    "run_folder",
    "typed_path",
]

# The largest file that is read as a whole: the rows of a million evaluations.
_MAX_BYTES = 1 << 28
# How a file is called until all of it is there.
_NEW = re.compile(r"\..+\.[0-9a-f]{16}\.new")

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_INSIDE = os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


class FolderError(OSError):
    """A folder that cannot be opened or used; the message says what to do."""


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _named_in_errors(method: _Method) -> _Method:
    """Gives errors of the system the path's name: an open file has none."""

    @functools.wraps(method)
    def named(path: "RunPath", *args: Any, **options: Any) -> Any:
        try:
            return method(path, *args, **options)
        except OSError as error:
            if error.errno is not None:
                error.filename = str(path)
            raise

    return cast(_Method, named)


@dataclass(frozen=True)
class RunPath:
    """A run folder, or what is in it.

    Attributes:
      root: The folder that the user named.
      parts: The names from there on.

    Raises:
      FolderError: A name would lead elsewhere.

    Example:
      >>> str(RunPath(Path("runs/lm")) / "summary.json")
      'runs/lm/summary.json'
    """

    root: Union[Path, "epath.Path"]
    parts: tuple[str, ...] = ()

    def __post_init__(self):
        for part in self.parts:
            if part in ("", ".", "..") or "/" in part or "\0" in part:
                raise FolderError(
                    f"{part!r} is no name of something in {self.root}; use names "
                    "without '/', and neither '.' nor '..'"
                )

    def __truediv__(self, name: str) -> "RunPath":
        return RunPath(self.root, (*self.parts, *name.split("/")))

    def __fspath__(self) -> str:
        return os.fspath(self.root.joinpath(*self.parts))

    def __str__(self) -> str:
        return os.fspath(self)

    @property
    def name(self) -> str:
        """The last name."""
        return self.parts[-1] if self.parts else self.root.name

    @property
    def parent(self) -> "RunPath":
        """The folder that this is in."""
        return RunPath(self.root, self.parts[:-1])

    @property
    def in_bucket(self) -> bool:
        """Whether it is in a bucket: then every write costs a request."""
        return is_in_bucket(os.fspath(self.root))

    def exists(self) -> bool:
        """Whether anything is there; a link is, wherever it leads."""
        return self._kind() is not None

    def is_dir(self) -> bool:
        """Whether a folder is there."""
        return self._kind() == stat.S_IFDIR

    def is_file(self) -> bool:
        """Whether a regular file is there; a link is none."""
        return self._kind() == stat.S_IFREG

    @_named_in_errors
    def read_bytes(self, max_bytes: int = _MAX_BYTES) -> bytes:
        """Reads a file.

        Args:
          max_bytes: A larger one is refused.

        Raises:
          FileNotFoundError: There is none.
          FolderError: It is no regular file, or too large.
        """
        if self.in_bucket:
            return self._remote.read_bytes()
        with self.open_file() as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise FolderError(
                    f"{self} has {size} bytes, and at most {max_bytes} are read; it is "
                    "not one that echo_jax has written"
                )
            return file.read(max_bytes)

    @_named_in_errors
    def open_file(self) -> io.BufferedReader:
        """Opens a file of any size for reading; not in a bucket.

        Raises:
          FileNotFoundError: There is none.
          FolderError: It is no regular file.
        """
        with self.open_parent() as parent:
            # Without waiting, since a named pipe would wait for ever.
            return open(self.open_in(parent, os.O_RDONLY | os.O_NONBLOCK), "rb")

    def read_text(self) -> str:
        """Reads a file of text; see `read_bytes`.

        Raises:
          FolderError: It is not UTF-8.
        """
        try:
            return self.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise FolderError(f"{self} is not text in UTF-8 ({error})") from error

    @_named_in_errors
    def write(self, content: str | bytes, *, is_new: bool = False) -> None:
        """Writes a file so that a reader sees the old file or the new one.

        Args:
          content: All of it; text is written as UTF-8.
          is_new: Whether a file that is there is left alone, by a link in place of a
            rename; not in a bucket.

        Raises:
          FileExistsError: One is there, and it was to be new.
          OSError: It cannot be written; a file that was there stays as it was.
        """
        data = content.encode() if isinstance(content, str) else content
        if self.in_bucket:
            write_object(os.fspath(self), data)
            return
        # Beside the file, because a rename is atomic within one file system only. By a
        # name that nobody can have put there before.
        new = f".{self.name}.{secrets.token_hex(8)}.new"
        with self.open_parent() as parent:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _INSIDE
            with open(os.open(new, flags, 0o666, dir_fd=parent), "wb") as file:
                try:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                    move = {"src_dir_fd": parent, "dst_dir_fd": parent}
                    if is_new:
                        os.link(new, self.name, follow_symlinks=False, **move)
                        os.unlink(new, dir_fd=parent)
                    else:
                        self._refuse_others(parent)
                        os.replace(new, self.name, **move)
                except BaseException:
                    # Ctrl-C may come when the file has its name already.
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(new, dir_fd=parent)
                    raise

    @_named_in_errors
    def append(self, text: str) -> None:
        """Adds text to the end of a file, which is there; not in a bucket.

        Raises:
          OSError: It cannot be written.
        """
        with self.open_parent() as parent:
            flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK
            with open(self.open_in(parent, flags), "ab") as file:
                file.write(text.encode())

    def mkdir(self) -> None:
        """Makes a folder, and those that it is in, unless they are there.

        Raises:
          FolderError: Something else is in its place.
        """
        if self.in_bucket:
            return  # A bucket has no folders, only names with a '/' in them.
        Path(self.root).mkdir(parents=True, exist_ok=True)
        with (self / "any").open_parent(make=True):
            pass

    def remove(self) -> None:
        """Removes a folder and all that is in it, if it is there; links alone.

        Raises:
          FolderError: Something else is in its place.
        """
        if self.in_bucket:
            if self._remote.exists():
                self._remote.rmtree()
        elif self.is_dir():
            with self.open_parent() as parent:
                shutil.rmtree(self.name, ignore_errors=True, dir_fd=parent)
        elif self.exists():
            raise self._refused(self._kind() or 0, "a folder")

    def remove_unfinished(self) -> None:
        """Removes from a folder what writes that were killed have left in it.

        For who has locked it: another process may be writing there else.
        """
        if self.in_bucket or not self.is_dir():
            return
        with (self / "any").open_parent() as folder:
            for name in os.listdir(folder):
                if is_unfinished(name):
                    # One that was refused the folder removes its own.
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder)

    def for_others(self) -> Union[Path, "epath.Path"]:
        """Returns a path for a library that opens the folder by itself.

        All that is in it was looked at: regular files and folders, and no links.

        Raises:
          FolderError: Anything else is in it.
        """
        path = self.root.joinpath(*self.parts)
        if self.in_bucket or not self.exists():
            return path
        if not self.is_dir():
            raise self._refused(self._kind() or 0, "a folder")
        with (self / "any").open_parent() as top:
            for folder, folders, files, opened in os.fwalk(dir_fd=top):
                for name in (*folders, *files):
                    mode = os.lstat(name, dir_fd=opened).st_mode
                    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                        found = self / os.path.normpath(f"{folder}/{name}")
                        raise found._refused(mode, "a file or a folder")
        return path

    @contextlib.contextmanager
    def open_parent(self, make: bool = False) -> Iterator[int]:
        """Opens the folder that this is in, name by name; gives its descriptor."""
        opened = os.open(self.root, _FOLDER)
        try:
            at = RunPath(self.root)
            for part in self.parts[:-1]:
                at /= part
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=opened)
                above, opened = opened, at.open_in(opened, _FOLDER)
                os.close(above)
            yield opened
        finally:
            os.close(opened)

    def open_in(self, parent: int, flags: int) -> int:
        """Opens this itself, in the folder that it is in; gives its descriptor.

        Args:
          parent: From `open_parent`.
          flags: As `os.open` has them.

        Raises:
          FolderError: It is no regular file; or no folder, if the flags ask for one.
        """
        wanted = stat.S_IFDIR if flags & os.O_DIRECTORY else stat.S_IFREG
        try:
            opened = os.open(self.name, flags | _INSIDE, dir_fd=parent)
        except FileNotFoundError as error:
            error.filename = str(self)
            raise
        except OSError:
            mode = os.lstat(self.name, dir_fd=parent).st_mode
            if stat.S_IFMT(mode) == wanted:
                raise
            raise self._refused(mode, _KINDS[wanted]) from None
        mode = os.fstat(opened).st_mode
        if stat.S_IFMT(mode) != wanted:
            os.close(opened)
            raise self._refused(mode, _KINDS[wanted])
        return opened

    def _refuse_others(self, parent: int) -> None:
        """Refuses to replace what no write can have put there."""
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(self.name, dir_fd=parent).st_mode
            if not stat.S_ISREG(mode):
                raise self._refused(mode, "a file")

    def _refused(self, mode: int, wanted: str) -> FolderError:
        found = _KINDS.get(stat.S_IFMT(mode), "a device")
        return FolderError(
            f"{self} is {found} where {wanted} belongs; nothing that echo_jax has "
            "written, so it is not opened: look where the folder comes from"
        )

    def _kind(self) -> int | None:
        """The kind of what is there, as ``stat`` has it; None if nothing is."""
        if self.in_bucket:
            if self._remote.is_dir():
                return stat.S_IFDIR
            return stat.S_IFREG if self._remote.exists() else None
        try:
            if not self.parts:
                return stat.S_IFMT(os.stat(self.root).st_mode)
            with self.open_parent() as parent:
                return stat.S_IFMT(os.lstat(self.name, dir_fd=parent).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return None

    @property
    def _remote(self) -> Any:
        return self.root.joinpath(*self.parts)


def is_unfinished(name: str) -> bool:
    """Whether a write that was killed has left a file, by its name."""
    return _NEW.fullmatch(name) is not None


def typed_path(path: str | os.PathLike[str]) -> Path:
    """Returns a local path that somebody typed, with ``~`` as the home folder.

    Shells leave ``~`` as it is behind ``=`` and ``:``, as in ``--workdir=~/runs``.

    Args:
      path: The path. ``./~/runs`` is a folder of the name ``~``.

    Raises:
      FolderError: The home folder is not known.

    Example:
      >>> typed_path("runs/lm")
      PosixPath('runs/lm')
    """
    text = os.fspath(path)
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise FolderError(
            f"{text} begins with '~', and that home folder is not known; set HOME, or "
            f"give the whole path (./{text} is a folder of that name)"
        )
    found = Path(expanded)
    # pathlib drops the "./" of "./~", which another call would then take for a home.
    return found.absolute() if found.parts[:1] and found.parts[0][0] == "~" else found


def run_folder(path: str | os.PathLike[str]) -> RunPath:
    """Opens a run folder, which need not exist yet.

    That a bucket is there, and lets this process in, is found out here: at once, and
    with the question that Orbax will ask before it saves.

    Args:
      path: A path, or ``gs://BUCKET/FOLDER``. The latter as text: pathlib takes
        one of its two slashes away.

    Returns:
      The folder.

    Raises:
      FolderError: It is neither, the extra ``gcs`` is not installed, or the bucket
        cannot be reached.

    Example:
      >>> str(run_folder("gs://my-bucket/runs/lm") / "summary.json")
      'gs://my-bucket/runs/lm/summary.json'
    """
    if isinstance(path, RunPath):
        return path
    text = os.fspath(path)
    if not text:
        raise FolderError("'' is no folder; give a path, or gs://BUCKET/FOLDER")
    if is_in_bucket(text):
        try:
            return RunPath(open_bucket(text))
        except BucketError as error:
            raise FolderError(str(error)) from error
    if re.match(r"\w\w+:/", text):
        raise FolderError(
            f"{text} is no folder: give a local path, or gs://BUCKET/FOLDER as text"
        )
    return RunPath(typed_path(text))


def run_file(path: str | os.PathLike[str]) -> RunPath:
    """Names a file in a folder of the user's, which need not exist yet.

    Args:
      path: A path, or ``gs://BUCKET/FOLDER/FILE`` as text.

    Raises:
      FolderError: See `run_folder`.

    Example:
      >>> run_file("runs/lm/tape.json").name
      'tape.json'
    """
    if isinstance(path, RunPath):
        return path
    folder, slash, name = os.fspath(path).rpartition("/")
    return run_folder((folder or slash) or ".") / name
