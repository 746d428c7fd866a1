"""Locks of others: of processes that are gone, and of other machines."""

from dataclasses import replace

from echo_jax.files import lock
from echo_jax.files.folders import run_folder
from echo_jax.files.lock import FolderInUseError, FolderLock, _Owner

OTHER_HOST = "elsewhere-7"


def line_of_the_dead():
    """The lock of a process of this machine that is gone."""
    return replace(_Owner.this_process(), began="1").line()


def line_of_another_machine():
    """The lock of a process that this machine cannot see."""
    mine = _Owner.this_process()
    return replace(mine, host=OTHER_HOST, pid="4711", machine="0" * 32).line()


class Looks:
    """Stands for the waiting between two looks at a lock.

    Attributes:
      number: How often it was waited.
      on: What happens meanwhile, by that number.
    """

    def __init__(self, on=None):
        self.number, self.on = 0, on or {}

    def __call__(self, seconds):
        self.number += 1
        self.on.get(self.number, lambda: None)()


def contend(folders, barrier, wins, patience_s):
    """Wants one folder after another at the same time as another process.

    Args:
      folders: In both processes the same.
      barrier: Of both.
      wins: Counts for each folder whether this process has had it.
      patience_s: How long to wait for the other process.
    """
    lock.sleep = lambda seconds: None
    for number, folder in enumerate(folders):
        barrier.wait(patience_s)
        try:
            with FolderLock(run_folder(folder)):
                wins[number] += 1
                barrier.wait(patience_s)
        except FolderInUseError:
            barrier.wait(patience_s)
