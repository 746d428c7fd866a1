"""Folders and files on a disk or in a bucket, as paths of `etils.epath`.

Paths are used as those of `pathlib`. What this module adds: a path as a user types it,
a check of a bucket before its first use, and a write that no reader sees half done.
"""

import contextlib
import functools
import os
import re
import secrets
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etils import epath

_BUCKETS = "gs://"
# The limit for a bucket that does not answer; an answer takes a tenth of a second.
TIMEOUT_S = 20


class FolderError(OSError):
    """A folder cannot be opened or used; the message says what to do."""


def is_in_bucket(path: str | os.PathLike[str]) -> bool:
    """Whether a path is in a bucket, where every write costs a request."""
    return os.fspath(path).startswith(_BUCKETS)


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
def run_folder(path: str | os.PathLike[str]) -> epath.Path:
    """Opens a run folder (a path or ``gs://BUCKET/FOLDER``) that need not exist yet."""
    text = os.fspath(path)
    if not text:
        raise FolderError("'' is no folder; give a path, or gs://BUCKET/FOLDER")
    if is_in_bucket(text):
        bucket, _, folder = text.removeprefix(_BUCKETS).partition("/")
        if not bucket or not folder.strip("/"):
            raise FolderError(f"{text} names no folder in a bucket: gs://BUCKET/FOLDER")
        _check(bucket)
        return epath.Path(text)
    if re.match(r"\w\w+:/", text):
        raise FolderError(
            f"{text} is no folder: give a local path, or gs://BUCKET/FOLDER as text"
        )
    return epath.Path(typed_path(text))


# Cached, so that a bucket is asked for once. The clients are imported here: they are in
# the extra ``gcs``, and their import takes seconds.
@functools.cache
def _check(bucket: str) -> None:
    """Sets up all clients, also Orbax's, to see the same objects of a bucket."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator:
        # TensorStore, which writes the arrays, has another name for it.
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)
    # Otherwise gcsfs asks another service for the bucket's kind at every write.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    # With TensorFlow installed, epath (which Orbax uses for its files) would use
    # TensorFlow's client.
    os.environ.setdefault("EPATH_USE_TF", "false")
    try:
        import gcsfs  # noqa: F401
        from etils.epath import gpath
        from fsspec.config import conf
        from google.api_core.exceptions import Forbidden, GoogleAPIError, NotFound
        from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
        from google.cloud import storage
    except ImportError as error:
        raise FolderError(
            f"gs:// needs a package that is not installed ({error}); "
            "run pip install 'echo-jax[gcs]'"
        ) from error
    # epath keeps what it read at the first path of any kind.
    with contextlib.suppress(AttributeError):  # A private function of etils.
        gpath._is_tf_installed.cache_clear()
    conf["gs"] = {
        # Without credentials it would continue anonymously.
        "token": "anon" if emulator else "google_default",
        # A cache would not see the writes of other processes and of TensorStore.
        "use_listings_cache": False,
        **conf.get("gs", {}),
    }
    fixes = {
        DefaultCredentialsError: "run 'gcloud auth application-default login', or name "
        "a key file in GOOGLE_APPLICATION_CREDENTIALS",
        NotFound: "make it: gcloud storage buckets create",
        Forbidden: "grant the account roles/storage.objectUser and "
        "roles/storage.legacyBucketReader on the bucket",
    }
    try:
        client: Any = storage.Client()  # Its types forbid the documented None.
        client.get_bucket(bucket, timeout=TIMEOUT_S, retry=None)
    except (GoogleAPIError, GoogleAuthError, OSError) as error:
        fix = fixes.get(type(error), "if no project is known, set GOOGLE_CLOUD_PROJECT")
        raise FolderError(
            f"{_BUCKETS}{bucket} cannot be used: {error}; {fix}"
        ) from error


def run_file(path: str | os.PathLike[str]) -> epath.Path:
    """Returns a file in a user's folder, which need not exist yet."""
    folder, slash, name = os.fspath(path).rpartition("/")
    return run_folder((folder or slash) or ".") / name


def is_name(text: Any) -> bool:
    """Whether a value from a file names something right in a folder."""
    return isinstance(text, str) and bool(re.fullmatch(r"(?!\.{1,2}$)[^/\0]+", text))


def write(path: epath.Path, content: str | bytes) -> None:
    """Replaces a file atomically; its folder must exist."""
    data = content.encode() if isinstance(content, str) else content
    if is_in_bucket(path):
        import fsspec

        # Large content blocks the client's own event loop, which has no other task.
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            # Not path.open(): closing it after an error would leave a partial object.
            fsspec.filesystem("gs").pipe_file(os.fspath(path), data)
        return
    # In the same folder, because a rename is atomic only within one file system. Two
    # processes may write the same file.
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    with _named(path):
        try:
            with open(new, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        finally:
            with contextlib.suppress(OSError):  # It is there after a failure only.
                os.unlink(new)


def append(path: epath.Path, text: str) -> None:
    """Appends text to a file on a disk."""
    with _named(path), open(path, "a", encoding="utf-8") as file:
        file.write(text)


@contextlib.contextmanager
def _named(path: epath.Path) -> Iterator[None]:
    """Names the file in an error of the system; an open file has no name there."""
    try:
        yield
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def remove_unfinished(folder: epath.Path) -> None:
    """Removes what killed writes have left in a folder that the caller has locked."""
    if not is_in_bucket(folder):
        for left in Path(folder).glob(".*.new"):
            left.unlink()
