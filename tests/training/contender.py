"""A process that wants folders at the same time as another: light to import."""

import time

from echo_jax.files import FolderInUseError, FolderLock, run_folder

LONG_S = 600  # What takes longer hangs, however busy the machine is.


def contend(folders, barrier, wins):
    """Wants one folder after another at the same time as another process."""
    time.sleep = lambda seconds: None
    for number, folder in enumerate(folders):
        barrier.wait(LONG_S)
        try:
            with FolderLock(run_folder(folder)):
                wins[number] += 1
                barrier.wait(LONG_S)
        except FolderInUseError:
            barrier.wait(LONG_S)
