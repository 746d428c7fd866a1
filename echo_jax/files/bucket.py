"""Buckets of Google Cloud Storage, and their clients.

The clients are imported only where a bucket is used: they are in the extra ``gcs``, and
the import takes seconds.
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
    # With TensorFlow installed, epath (which Orbax uses for its files) would use
    # TensorFlow's client.
    os.environ.setdefault("EPATH_USE_TF", "false")

_PREFIX = "gs://"
# The limit for a bucket that does not answer; an answer takes a tenth of a second.
_TIMEOUT_S = 20


class BucketError(OSError):
    """A bucket cannot be used; the message says what to do."""


def is_in_bucket(path: str) -> bool:
    return path.startswith(_PREFIX)


def open_bucket(path: str) -> "epath.Path":
    """Checks the bucket of ``gs://BUCKET/FOLDER`` and sets up all its clients."""
    bucket, _, folder = path.removeprefix(_PREFIX).partition("/")
    if not bucket or not folder.strip("/"):
        raise BucketError(f"{path} names no folder in a bucket: gs://BUCKET/FOLDER")
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
        raise BucketError(
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
        raise BucketError(f"{_PREFIX}{bucket} cannot be used: {what}") from error


def _set_up_clients() -> None:
    """Makes all clients, including those of Orbax, see the same objects."""
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
