"""Folders and files on a disk or in a bucket, as paths of `etils.epath`.

Paths are used as those of `pathlib`. What this module adds: a path as a user types it,
and a write that no reader sees half done.
"""

import contextlib
import os
import re
import secrets
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if find_spec("gcsfs"):
    # With TensorFlow installed, epath (which Orbax uses for its files) would use
    # TensorFlow's client.
    os.environ.setdefault("EPATH_USE_TF", "false")

from etils import epath

from echo_jax.files import bucket


class FolderError(OSError):
    """A folder cannot be opened or used; the message says what to do."""


def is_in_bucket(path: str | os.PathLike[str]) -> bool:
    """Whether a path is in a bucket, where every write costs a request."""
    return os.fspath(path).startswith(bucket.PREFIX)


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
        try:
            bucket.check(text)
        except bucket.BucketError as error:
            raise FolderError(str(error)) from error
        return epath.Path(text)
    if re.match(r"\w\w+:/", text):
        raise FolderError(
            f"{text} is no folder: give a local path, or gs://BUCKET/FOLDER as text"
        )
    return epath.Path(typed_path(text))


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
        bucket.write_object(os.fspath(path), data)
        return
    # In the same folder, because a rename is atomic only within one file system. Two
    # processes may write the same file.
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    try:
        with open(new, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(new)
        if isinstance(error, OSError):
            error.filename = os.fspath(path)
        raise


def append(path: epath.Path, text: str) -> None:
    """Appends text to a file on a disk."""
    with open(path, "a", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except OSError as error:
            error.filename = os.fspath(path)  # An open file has none.
            raise


def remove_unfinished(folder: epath.Path) -> None:
    """Removes what killed writes have left in a folder that the caller has locked."""
    if not is_in_bucket(folder):
        for left in Path(folder).glob(".*.new"):
            left.unlink()
