"""Locks a folder for one writer at a time; other processes are refused.

The lock is a file of one line in the folder. It names the owner, and the owner makes a
new version of it every few seconds. Its content changes by compare-and-swap
(`echo_jax.files.lock_file`), so that exactly one process wins on a disk, on a shared
disk and in a bucket. A process that finds a lock checks whether its owner is alive:

- On the same machine since the same boot, it checks the process id and the start time
  of that process. So a run whose process was killed can resume at once.
- For another machine, it can only see whether the lock changes. It watches for a minute
  and prints this; then it takes over an unchanged lock. It compares only versions that
  it has seen itself, never a time with its own clock.

``flock`` alone is not enough: some shared disks keep it within a machine, some keep it
for a machine that is gone, and buckets do not have it. The library filelock opens by
path, through links, and does not support buckets.

An owner that was suspended so long that others may have taken over detects this at its
next `FolderLock.check`, and stops.
"""

import contextlib
import hashlib
import os
import platform
import re
import secrets
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from echo_jax.files.folders import FolderError, RunPath
from echo_jax.files.lock_file import Found, lock_file
from echo_jax.terminal.countdown import Countdown

__all__ = ["LOCK_NAME", "REPORT_LOCK_NAME", "FolderInUseError", "FolderLock"]

# These cannot be names of arms, which begin with a letter or a digit.
LOCK_NAME = ".lock"
# The lock of a report's files: a report is possible while a run trains in the folder.
REPORT_LOCK_NAME = ".report.lock"
_TOUCH_EVERY_S = 10
_LOOK_EVERY_S = 1
# The number of checks after which an unchanged lock of another machine is taken over.
_SILENT_LOOKS = 60
# On a disk without compare-and-swap, time for all simultaneous writes to finish.
_SETTLE_S = 2
_LINE_EVERY_S = 10.0

# A lock may come from a stranger: only text of these forms is shown.
_OWNER = re.compile(
    rb"host=(?P<host>[\w.-]{1,255}) pid=(?P<pid>[1-9]\d{0,8}) "
    rb"since=(?P<since>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ) "
    rb"machine=(?P<machine>[0-9a-f]{32}) began=(?P<began>\d{1,20}) "
    rb"token=(?P<token>[0-9a-f]{32})\n"
)


class FolderInUseError(FolderError):
    """Another process has the folder; the message says which, and what to do."""


@dataclass(frozen=True)
class _Owner:
    """The owner of a folder.

    Attributes:
      since: The time at which it took the folder, by its own clock, only to show it.
      machine: A boot of a machine, and the processes that see each other's ids.
      began: The start of the process, in ticks since the boot; 0 if unknown.
      token: Random, to identify the lock.
    """

    host: str
    pid: str
    since: str
    machine: str
    began: str
    token: str

    @classmethod
    def this_process(cls) -> Self:
        return cls(
            host=re.sub(r"[^A-Za-z0-9_.-]", "_", platform.node())[:255] or "localhost",
            pid=str(os.getpid()),
            since=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            machine=_this_machine(),
            began=(_state_and_began(os.getpid()) or ("", "0"))[1],
            token=secrets.token_hex(16),
        )

    @classmethod
    def parse(cls, content: bytes) -> Self | None:
        """Reads the content of a lock; None if `line` cannot have written it."""
        match = _OWNER.fullmatch(content)
        if match is None:
            return None
        return cls(**{name: text.decode() for name, text in match.groupdict().items()})

    def line(self) -> bytes:
        fields = " ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{fields}\n".encode()

    def is_alive(self) -> bool | None:
        """Whether the process exists; None where this process cannot know."""
        if self.machine != _this_machine():
            return None
        try:
            os.kill(int(self.pid), 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # It exists and belongs to another user.
        found = _state_and_began(int(self.pid))
        if found is None:
            return None
        state, began = found
        # Z and X: it was killed, and its parent has not read its exit status.
        return state not in "ZX" and began == self.began

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


# The lock makes missing folders, and removes them at the end if they are still empty.
# `on_wait` gets a text and the fraction of the waiting time; by default it prints.
class FolderLock:
    """Locks all of the folders or none, from entry to exit."""

    def __init__(
        self,
        *folders: RunPath,
        name: str = LOCK_NAME,
        on_wait: Callable[[str, float], None] | None = None,
    ):
        self._folders, self._name, self._on_wait = folders, name, on_wait
        self._silent: dict[RunPath, tuple[Found, int]] = {}
        self._owned: list[RunPath] = []
        self._made: list[str] = []
        self._lost = ""
        self._touching = threading.Lock()
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        self._files = {
            folder: lock_file(folder / self._name) for folder in self._folders
        }
        self._owner = _Owner.this_process()
        self._touched_s = time.monotonic()
        self._thread = threading.Thread(target=self._keep_touching, daemon=True)
        try:
            if self._folders:
                self._thread.start()
                self._take_all()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._release()

    def check(self) -> None:
        """Raises FolderInUseError if another process has taken a folder over; cheap."""
        if time.monotonic() > self._touched_s + 3 * _TOUCH_EVERY_S:
            self._touch()  # The thread of a continued process may run later than this.
        if self._lost:
            raise FolderInUseError(self._lost)

    def _take_all(self) -> None:
        with contextlib.ExitStack() as stack:
            show = self._on_wait
            # In turns: all folders share one minute of waiting.
            while missing := [f for f in self._folders if not self._take(f)]:
                if show is None:
                    countdown = Countdown(line_every_s=_LINE_EVERY_S)
                    show = stack.enter_context(countdown).show
                show(*self._waiting_for(missing[0]))
                time.sleep(_LOOK_EVERY_S)

    def _take(self, folder: RunPath) -> bool:
        """Takes a folder if it is available now."""
        file = self._files[folder]
        for _ in range(3):  # Read, write, and read again to see who wrote.
            if folder in self._owned:
                return True
            found = file.read()
            if found is None:
                self._make(folder)
                file.create(self._owner.line())
            elif (owner := self._parse(folder, found)).token == self._owner.token:
                self._owned.append(folder)
            elif self._is_gone(folder, found, owner):
                file.replace(found, self._owner.line())
            else:
                return False
            if not file.is_exact:
                time.sleep(_SETTLE_S)
        return folder in self._owned

    def _is_gone(self, folder: RunPath, found: Found, owner: _Owner) -> bool:
        """Whether the owner of a lock is gone; False while that is not known."""
        is_alive = owner.is_alive()
        if is_alive is None:
            before, looks = self._silent.get(folder, (found, -1))
            looks += 1
            self._silent[folder] = found, looks
            is_alive = found != before
            if not is_alive and looks < _SILENT_LOOKS:
                return False
        if is_alive:
            raise FolderInUseError(
                f"{folder} is in use by {owner}; wait until that ends, or stop it, or "
                "name another folder"
            )
        return True

    def _waiting_for(self, folder: RunPath) -> tuple[str, float]:
        if folder not in self._silent:
            return f"waiting for {folder}", 0.0
        found, looks = self._silent[folder]
        what = (
            f"looking whether {folder} is still in use by {_Owner.parse(found.content)}"
        )
        return what, looks / _SILENT_LOOKS

    def _parse(self, folder: RunPath, found: Found) -> _Owner:
        owner = _Owner.parse(found.content)
        if owner is None:
            raise FolderError(
                f"{folder / self._name} is no lock that echo_jax has written; remove "
                "it if nothing uses the folder"
            )
        return owner

    def _make(self, folder: RunPath) -> None:
        self._made += _missing(folder)
        folder.mkdir()

    def _keep_touching(self) -> None:
        while not self._is_over.wait(_TOUCH_EVERY_S):
            self._touch()

    def _touch(self) -> None:
        """Shows others that this process lives, and checks that it still owns."""
        with self._touching:
            self._touched_s = time.monotonic()
            for folder in self._owned:
                # The next touch may succeed where this one fails; other writes to
                # such a disk or bucket fail by themselves.
                with contextlib.suppress(OSError):
                    found = self._files[folder].read()
                    if found is None:
                        self._lost = (
                            f"the lock of {folder} was removed, so this process stops"
                        )
                    elif (owner := self._parse(folder, found)) != self._owner:
                        self._lost = (
                            f"{folder} was taken over by {owner}, after this process "
                            "had given no sign for a minute, so this one stops"
                        )
                    else:
                        self._files[folder].touch(found)

    def _release(self) -> None:
        self._is_over.set()
        if self._thread.ident:
            self._thread.join()
        # A folder that was removed in the meantime stays removed.
        for folder in reversed(self._folders):
            with contextlib.suppress(OSError):
                found = self._files[folder].read()
                if found and found.content == self._owner.line():
                    self._files[folder].remove(found)
        for folder in sorted(self._made, key=len, reverse=True):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _missing(folder: RunPath) -> list[str]:
    """Returns the folders that `RunPath.mkdir` would make, the innermost first."""
    missing: list[str] = []
    path = os.path.abspath(folder)
    while not folder.in_bucket and not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def _this_machine() -> str:
    """Names a boot of a machine and its namespace of process ids."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read()
        seen = os.readlink("/proc/self/ns/pid")
    except OSError:  # Not Linux.
        boot, seen = platform.node(), str(uuid.getnode())
    return hashlib.sha256(f"{boot}\n{seen}".encode()).hexdigest()[:32]


def _state_and_began(pid: int) -> tuple[str, str] | None:
    """Returns a process's state and start time; None where they cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name before it may contain anything, also brackets.
            fields = file.read().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (IndexError, OSError):
        return None
