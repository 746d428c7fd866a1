"""Files and folders on a disk or in a bucket: atomic writes and locks."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "folders": ["FolderError", "remove_unfinished", "run_folder", "write"],
        "json_files": ["DamagedFileError", "read_json", "read_line", "write_json"],
        "lock": ["FolderInUseError", "FolderLock", "LOCK_NAME", "REPORT_LOCK_NAME"],
    },
)
