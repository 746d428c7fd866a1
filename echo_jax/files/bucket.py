"""Buckets of Google Cloud Storage, and the clients by which they are used.

What these need is imported only where a bucket is used: it is in the extra ``gcs``, and
takes seconds.
"""

import contextlib
import functools
import os
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etils import epath

__all__ = ["BucketError", "is_in_bucket", "open_bucket", "write_object"]

if find_spec("gcsfs"):
    # Where TensorFlow is installed, epath, by which Orbax finds its files, would use
    # that one's client.
    os.environ.setdefault("EPATH_USE_TF", "false")

_PREFIX = "gs://"
# For a bucket that does not answer; one that does takes a tenth of a second.
_TIMEOUT_S = 20


class BucketError(OSError):
    """A bucket that cannot be used; the message says what to do."""


def is_in_bucket(path: str) -> bool:
    """Whether a path begins as those in a bucket do."""
    return path.startswith(_PREFIX)


def open_bucket(path: str) -> "epath.Path":
    """Makes sure that the bucket of a folder is there, and lets this process in.

    Args:
      path: The folder, ``gs://BUCKET/FOLDER``; it need not exist yet.

    Returns:
      The folder, for all of whose clients everything is set up.

    Raises:
      BucketError: The path names no folder in a bucket, the extra ``gcs`` is not
        installed, or the bucket cannot be reached.
    """
    bucket, _, folder = path.removeprefix(_PREFIX).partition("/")
    if not bucket or not folder.strip("/"):
        raise BucketError(f"{path} names no folder in a bucket: gs://BUCKET/FOLDER")
    _open(bucket)
    from etils import epath

    return epath.Path(path)


def write_object(path: str, data: bytes) -> None:
    """Writes an object, which is there when all of it is.

    Args:
      path: In a bucket that was opened.
      data: All of it.
    """
    import fsspec

    # Not path.open(): closing it after an error would leave what was written so far.
    with warnings.catch_warnings():
        # Large content holds up the client's own event loop, which does nothing else.
        warnings.simplefilter("ignore", ResourceWarning)
        fsspec.filesystem("gs").pipe_file(path, data)


@functools.cache
def _open(bucket: str) -> None:
    """Sets up the clients of a bucket, and makes sure that it can be used."""
    try:
        _set_up_clients()
    except ImportError as error:
        raise BucketError(
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
        raise BucketError(f"{_PREFIX}{bucket} cannot be used: {what}") from error


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
    from etils.epath import gpath
    from fsspec.config import conf

    # It looks at EPATH_USE_TF once, at its first path of any kind, and that may have
    # been before this module was imported.
    with contextlib.suppress(AttributeError):  # It is etils' own.
        gpath._is_tf_installed.cache_clear()

    conf["gs"] = {
        # Without credentials it would go on as nobody.
        "token": "anon" if emulator else "google_default",
        # Other processes and TensorStore write too, of which a cache learns nothing.
        "use_listings_cache": False,
        **conf.get("gs", {}),
    }
