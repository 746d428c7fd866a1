"""Files and folders, on a disk or in a bucket: whole, locked, and read as hostile."""
