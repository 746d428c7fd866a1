"""Files and folders on a disk or in a bucket: atomic writes, locks, untrusted reads."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "folders": ["FolderError", "RunPath", "run_file", "run_folder"],
        "json_files": [
            "DamagedFileError",
            "json_line",
            "read_json",
            "read_line",
            "seal",
            "unseal",
            "write_json",
        ],
        "lock": ["FolderInUseError", "FolderLock", "LOCK_NAME", "REPORT_LOCK_NAME"],
    },
)
