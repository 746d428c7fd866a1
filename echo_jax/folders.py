"""Run folders: on a file system, or in a bucket of Google Cloud Storage.

The one place where a run folder is opened and where its small files are written;
Orbax writes the checkpoints. What needs a bucket is imported only for one: it is in
the extra ``gcs``, and takes seconds.
"""

import functools
import os
import re
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

if TYPE_CHECKING:
    from etils import epath

__all__ = [
    "FolderError",
    "RunPath",
    "copy_folder",
    "in_bucket",
    "remove_folder",
    "run_folder",
    "write_whole",
]

# A run folder, or a file in it.
RunPath: TypeAlias = Union[Path, "epath.Path"]

if find_spec("gcsfs"):
    # Where TensorFlow is installed, epath, by which Orbax finds its files, would use
    # that one's client. Set here, because epath looks once, at its first path.
    os.environ.setdefault("EPATH_USE_TF", "false")

_BUCKETS = "gs://"
# For a bucket that does not answer; one that does takes a tenth of a second.
_TIMEOUT_S = 20


class FolderError(OSError):
    """A folder that cannot be opened; the message says what to do."""


def run_folder(path: str | RunPath) -> RunPath:
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
      >>> run_folder("gs://my-bucket/runs/lm") / "summary.json"
      PosixGPath('gs://my-bucket/runs/lm/summary.json')
    """
    text = os.fspath(path)
    if not in_bucket(text):
        if re.match(r"\w\w+:/", text):
            raise FolderError(
                f"{text} is no folder: give a local path, or gs://BUCKET/FOLDER as text"
            )
        return Path(text)
    bucket, _, folder = text.removeprefix(_BUCKETS).partition("/")
    if not bucket or not folder.strip("/"):
        raise FolderError(f"{text} names no folder in a bucket: gs://BUCKET/FOLDER")
    _open_bucket(bucket)
    from etils import epath

    return epath.Path(text)


def in_bucket(path: str | RunPath) -> bool:
    """Whether a path leads into a bucket: then every write costs a request."""
    return os.fspath(path).startswith(_BUCKETS)


def write_whole(path: RunPath, content: str | bytes) -> None:
    """Writes a file so that a reader sees the old file or the new one.

    Args:
      path: The file, in a folder that exists; replaced if it exists.
      content: All of it; text is written as UTF-8.

    Raises:
      OSError: It cannot be written; a file that was there stays as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    if in_bucket(path):
        import fsspec

        # An object is there when all of it is. Not path.open(): closing it after an
        # error would leave what was written so far.
        with warnings.catch_warnings():
            # Large content holds up the client's own event loop, which does nothing
            # else.
            warnings.simplefilter("ignore", ResourceWarning)
            fsspec.filesystem("gs").pipe_file(os.fspath(path), data)
        return
    # Beside the file, because a rename is atomic within one file system only.
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def copy_folder(source: Path, target: RunPath) -> None:
    """Copies the files of a local folder, each as a whole.

    Args:
      source: Which one.
      target: Receives its files; made if there is none.

    Raises:
      OSError: A file cannot be written.
    """
    for file in sorted(source.rglob("*")):
        if file.is_file():
            copy = target / file.relative_to(source).as_posix()
            if not in_bucket(target):
                copy.parent.mkdir(parents=True, exist_ok=True)
            write_whole(copy, file.read_bytes())


def remove_folder(path: RunPath) -> None:
    """Removes a folder and all that is in it, if it is there."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        path.rmtree()


@functools.cache
def _open_bucket(bucket: str) -> None:
    """Sets up the clients of a bucket, and makes sure that it can be used."""
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
        client: Any = storage.Client()  # Its types forbid None, which it documents.
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
        raise FolderError(f"{_BUCKETS}{bucket} cannot be used: {what}") from error


def _set_up_clients() -> None:
    """Makes all clients, which Orbax calls too, see the same objects.

    Raises:
      ImportError: One is not installed.
    """
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator:
        # TensorStore, which writes the arrays, has a name of its own for it.
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)
    # Else gcsfs asks another service what kind of bucket it is, at every write.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import gcsfs  # noqa: F401
    import google.cloud.storage  # noqa: F401
    from fsspec.config import conf

    conf["gs"] = {
        # Without credentials it would go on as nobody.
        "token": "anon" if emulator else "google_default",
        # Other processes and TensorStore write too, of which a cache learns nothing.
        "use_listings_cache": False,
        **conf.get("gs", {}),
    }
