"""Buckets of Google Cloud Storage: their clients, objects, and errors.

The clients are imported only where a bucket is used: they are in the extra ``gcs``, and
the import takes seconds.
"""

import contextlib
import functools
import os
import warnings
from typing import Any

PREFIX = "gs://"
# The limit for a bucket that does not answer; an answer takes a tenth of a second.
TIMEOUT_S = 20


class BucketError(Exception):
    """A bucket cannot be used; the message says what to do."""


def split(path: str) -> tuple[str, str]:
    """Returns the bucket and the name of ``gs://BUCKET/NAME``."""
    bucket, _, name = path.removeprefix(PREFIX).partition("/")
    return bucket, name


def check(path: str) -> None:
    """Sets up all clients of ``gs://BUCKET/FOLDER``, and asks for the bucket once."""
    bucket, folder = split(path)
    if not bucket or not folder.strip("/"):
        raise BucketError(f"{path} names no folder in a bucket: gs://BUCKET/FOLDER")
    _open(bucket)


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
        raise BucketError(f"{PREFIX}{bucket} cannot be used: {error}; {fix}") from error


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
