"""Run folders on a file system or in a bucket of Google Cloud Storage.

Only this module opens run folders and reads and writes their small files; Orbax writes
the checkpoints. A run folder may come from a stranger, so links in it are refused.
Every name below the user's folder is opened relative to its parent folder. Only regular
files of a limited size are read. The path to the folder itself is the user's own and
may contain links.

The clients of buckets are imported only where a bucket is used: they are in the extra
``gcs``, and the import takes seconds.
"""

import contextlib
import functools
import io
import os
import re
import secrets
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast

if TYPE_CHECKING:
    from etils import epath

if find_spec("gcsfs"):
    # With TensorFlow installed, epath (which Orbax uses for its files) would use
    # TensorFlow's client.
    os.environ.setdefault("EPATH_USE_TF", "false")

_PREFIX = "gs://"
# The limit for a bucket that does not answer; an answer takes a tenth of a second.
_TIMEOUT_S = 20


def is_in_bucket(path: str) -> bool:
    return path.startswith(_PREFIX)


def open_bucket(path: str) -> "epath.Path":
    """Checks the bucket of ``gs://BUCKET/FOLDER`` and sets up all its clients."""
    bucket, _, folder = path.removeprefix(_PREFIX).partition("/")
    if not bucket or not folder.strip("/"):
        raise FolderError(f"{path} names no folder in a bucket: gs://BUCKET/FOLDER")
    _open(bucket)
    from etils import epath

    return epath.Path(path)


def write_object(path: str, data: bytes) -> None:
    """Writes an object atomically; its bucket must be open."""
    import fsspec

    # Not path.open(): closing it after an error would leave a partial object.
    with warnings.catch_warnings():
        # Large content blocks the client's own event loop, which has no other task.
        warnings.simplefilter("ignore", ResourceWarning)
        fsspec.filesystem("gs").pipe_file(path, data)


@functools.cache
def _open(bucket: str) -> None:
    """Sets up the clients of a bucket and checks that it can be used."""
    try:
        _set_up_clients()
    except ImportError as error:
        raise FolderError(
            f"gs:// needs a package that is not installed ({error}); "
            "run pip install 'echo-jax[gcs]'"
        ) from error
    from google.api_core.exceptions import Forbidden, GoogleAPIError, NotFound
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
    from google.cloud import storage

    try:
        client: Any = storage.Client()  # Its types forbid the documented None.
        client.get_bucket(bucket, timeout=_TIMEOUT_S, retry=None)
    except (GoogleAPIError, GoogleAuthError, OSError) as error:
        what = str(error)
        if isinstance(error, DefaultCredentialsError):
            what = (
                f"there are no Google Cloud credentials ({error}); run 'gcloud auth "
                "application-default login', or name a key file in "
                "GOOGLE_APPLICATION_CREDENTIALS"
            )
        elif isinstance(error, NotFound):
            what = "there is no such bucket; make it: gcloud storage buckets create"
        elif isinstance(error, Forbidden):
            what = (
                f"{error}; grant the account roles/storage.objectUser and "
                "roles/storage.legacyBucketReader on the bucket"
            )
        elif "Project was not passed" in what:
            what = "the account belongs to no project; set GOOGLE_CLOUD_PROJECT"
        raise FolderError(f"{_PREFIX}{bucket} cannot be used: {what}") from error


def _set_up_clients() -> None:
    """Makes all clients, also Orbax's, see the same objects."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator:
        # TensorStore, which writes the arrays, has another name for it.
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)
    # Otherwise gcsfs asks another service for the bucket's kind at every write.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import gcsfs  # noqa: F401
    import google.cloud.storage  # noqa: F401
    from etils.epath import gpath
    from fsspec.config import conf

    # etils reads EPATH_USE_TF once, at its first path of any kind, perhaps before the
    # import of this module.
    with contextlib.suppress(AttributeError):  # A private function of etils.
        gpath._is_tf_installed.cache_clear()

    conf["gs"] = {
        # Without credentials it would continue anonymously.
        "token": "anon" if emulator else "google_default",
        # A cache would not see the writes of other processes and of TensorStore.
        "use_listings_cache": False,
        **conf.get("gs", {}),
    }


# The largest file that is read as a whole: the rows of a million evaluations.
_MAX_BYTES = 1 << 28
# The name of a file until its content is complete.
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
    """A folder cannot be opened or used; the message says what to do."""


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _named_in_errors(method: _Method) -> _Method:
    """Adds the path's name to errors of the system, which an open file lacks."""

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
    """A path in a run folder: the user's folder `root`, and the names below it."""

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
        return self.parts[-1] if self.parts else self.root.name

    @property
    def parent(self) -> "RunPath":
        return RunPath(self.root, self.parts[:-1])

    @property
    def in_bucket(self) -> bool:
        """Whether it is in a bucket, where every write costs a request."""
        return is_in_bucket(os.fspath(self.root))

    def exists(self) -> bool:
        """Whether anything is there, even a dangling link."""
        return self._kind() is not None

    def is_dir(self) -> bool:
        return self._kind() == stat.S_IFDIR

    def is_file(self) -> bool:
        """Whether a regular file is there, not a link."""
        return self._kind() == stat.S_IFREG

    @_named_in_errors
    def read_bytes(self, max_bytes: int = _MAX_BYTES) -> bytes:
        """Reads a regular file of at most `max_bytes`."""
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
        """Opens a regular file of any size for reading; not in a bucket."""
        with self.open_parent() as parent:
            # Non-blocking, because a named pipe would block forever.
            return open(self.open_in(parent, os.O_RDONLY | os.O_NONBLOCK), "rb")

    def read_text(self) -> str:
        """Reads a UTF-8 file."""
        try:
            return self.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise FolderError(f"{self} is not text in UTF-8 ({error})") from error

    @_named_in_errors
    def write(self, content: str | bytes) -> None:
        """Replaces a file atomically."""
        data = content.encode() if isinstance(content, str) else content
        if self.in_bucket:
            write_object(os.fspath(self), data)
            return
        # In the same folder, because a rename is atomic only within one file system.
        # The random name cannot exist yet.
        new = f".{self.name}.{secrets.token_hex(8)}.new"
        with self.open_parent() as parent:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _INSIDE
            with open(os.open(new, flags, 0o666, dir_fd=parent), "wb") as file:
                try:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                    self._refuse_others(parent)
                    os.replace(new, self.name, src_dir_fd=parent, dst_dir_fd=parent)
                except BaseException:
                    # Ctrl-C may come after the rename.
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(new, dir_fd=parent)
                    raise

    @_named_in_errors
    def append(self, text: str) -> None:
        """Appends text to an existing file; not in a bucket."""
        with self.open_parent() as parent:
            flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK
            with open(self.open_in(parent, flags), "ab") as file:
                file.write(text.encode())

    def mkdir(self) -> None:
        """Makes a folder and its parents, unless they exist."""
        if self.in_bucket:
            return  # A bucket has no folders, only names with '/'.
        Path(self.root).mkdir(parents=True, exist_ok=True)
        with (self / "any").open_parent(make=True):
            pass

    def remove(self) -> None:
        """Removes a folder and its content, if it exists; does not follow links."""
        if self.in_bucket:
            if self._remote.exists():
                self._remote.rmtree()
        elif self.is_dir():
            with self.open_parent() as parent:
                shutil.rmtree(self.name, ignore_errors=True, dir_fd=parent)
        elif self.exists():
            raise self._refused(self._kind() or 0, "a folder")

    def remove_unfinished(self) -> None:
        """Removes killed writes' files from a folder that the caller has locked."""
        if self.in_bucket or not self.is_dir():
            return
        with (self / "any").open_parent() as folder:
            for name in os.listdir(folder):
                if _NEW.fullmatch(name):
                    os.unlink(name, dir_fd=folder)

    def for_others(self) -> Union[Path, "epath.Path"]:
        """Returns a path for another library, after a check for links and odd files."""
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
        """Opens the parent folder one name at a time and yields its descriptor."""
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
        """Opens this path in the folder `parent` and returns its descriptor."""
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
        """Refuses to replace anything but a regular file."""
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
        """The file type, as in ``stat``; None if nothing exists."""
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


# Shells keep ``~`` after ``=`` and ``:``, as in ``--workdir=~/runs``.
# ``./~/runs`` means a folder with the name ``~``.
def typed_path(path: str | os.PathLike[str]) -> Path:
    """Returns a local path that a user typed, with ``~`` as the home folder."""
    text = os.fspath(path)
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise FolderError(
            f"{text} begins with '~', and that home folder is not known; set HOME, or "
            f"give the whole path (./{text} is a folder of that name)"
        )
    found = Path(expanded)
    # pathlib drops the "./" of "./~"; another call would then read it as a home.
    return found.absolute() if found.parts[:1] and found.parts[0][0] == "~" else found


# The function checks that the bucket is accessible, so that an error comes early. A
# bucket must be given as text: pathlib removes one of its two slashes.
def run_folder(path: str | os.PathLike[str]) -> RunPath:
    """Opens a run folder (a path or ``gs://BUCKET/FOLDER``) that need not exist yet."""
    if isinstance(path, RunPath):
        return path
    text = os.fspath(path)
    if not text:
        raise FolderError("'' is no folder; give a path, or gs://BUCKET/FOLDER")
    if is_in_bucket(text):
        return RunPath(open_bucket(text))
    if re.match(r"\w\w+:/", text):
        raise FolderError(
            f"{text} is no folder: give a local path, or gs://BUCKET/FOLDER as text"
        )
    return RunPath(typed_path(text))


def run_file(path: str | os.PathLike[str]) -> RunPath:
    """Returns a file in a user's folder, which need not exist yet."""
    if isinstance(path, RunPath):
        return path
    folder, slash, name = os.fspath(path).rpartition("/")
    return run_folder((folder or slash) or ".") / name
