"""Files and folders on a disk or in a bucket: atomic writes, locks, untrusted reads."""
