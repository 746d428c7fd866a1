"""How the processes of a run end together: none waits for ever for one that is gone.

A collective waits for every process, without end. So each process gives a sign every
two seconds, in the key-value store of jax's runtime, which the first process keeps. Who
ends by itself says there why, and the others end with that sentence and exit status.
The first process looks for those that give no sign; the others see by themselves that
its store does not answer.

jax's own heartbeat would end them later, from C++, with a stack and without a name.
Where the first process is killed, jax's runtime aborts the others at once, for with it
goes a connection that it cannot do without. Its stack is followed by our sentence.
"""

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax._src import distributed as jax_distributed  # The store has no public name.

from echo_jax.terminal import ending
from echo_jax.terminal.printable import printable

__all__ = [
    "LOST",
    "Peers",
    "fail",
    "has_ended",
    "joined",
    "leave_ended",
    "shared_note",
    "tell_others",
    "this_one",
    "when_stop_asked",
]

LOST = 75  # The exit status: it may go well another time.
_SIGN_EVERY_S = 2.0
# Who gives no sign for so long is lost. jax's runtime waits for 100 s.
_SILENT_S = 60.0
# After a failure of what the devices do together, which may be because of that.
_SUSPECT_S = 7.0
_BLAME_S = 15.0
# How long the end of a process is held up so that all others hear of it.
_GOODBYE_S = 10.0
_CONNECT_S = 5.0

_IS_LOST = (
    "it was killed or stopped, or its machine is lost; all end, and updates since the "
    "last checkpoint are lost; run the same command to resume"
)
_SIGNS, _ENDS = "echo_jax/signs/", "echo_jax/ends/"
# Where jax's preemption service says that a process has got SIGTERM.
_STOP_ASKED = "RECEIVED_PREEMPTION_NOTICE"


class _End(NamedTuple):
    """Why a run ends in all of its processes.

    Attributes:
      status: What each exits with.
      said: One sentence.
    """

    status: int
    said: str


class Peers:
    """Gives signs of this process, and ends it with the others; see the module.

    Only the process of a command is ended. Elsewhere a program goes on.

    Args:
      client: Of jax's runtime: what has its ``key_value_*`` functions.
      process: Which this is.
      count: How many there are.
      now: The time in seconds; monotonic.
    """

    def __init__(
        self,
        client: Any,
        process: int,
        count: int,
        *,
        now: Callable[[], float] = time.monotonic,
    ):
        self._client, self._process, self._count = client, process, count
        self._now = now
        self._silent_s = _SILENT_S
        self._answered_s = now()
        self._changed: dict[int, tuple[list[Any], float]] = {}
        self._missing: set[int] = set()
        self._note = ""
        self._show: Callable[[str], None] = lambda line: None
        self._on_stop: Callable[[], None] | None = None
        self._to_tell: _End | None = None
        self._end: _End | None = None
        self._is_known = threading.Event()
        self._is_leaving = threading.Event()
        self._wake = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._give_signs, "signs"), (self._look, "peers"))
        ]

    @property
    def name(self) -> str:
        """What this process is called in a sentence."""
        return self._name(self._process)

    @property
    def has_ended(self) -> bool:
        """Whether this process leaves by itself, or because another one did."""
        return self._to_tell is not None or self._end is not None

    def start(self) -> None:
        """Gives signs from now on."""
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        """Gives the last sign: this process is not missed from now on."""
        self._is_leaving.set()
        self._wake.set()
        self._threads[0].join(timeout=_GOODBYE_S)

    def leave_ended(self) -> None:
        """Gives the last sign where this process has said why it ends.

        Not before: with the first process, which ends then, goes what jax's runtime
        cannot do without.
        """
        if threading.current_thread() is self._threads[0]:
            self._give_sign(None)
        elif self._to_tell is not None:
            self.leave()

    def tell(self, status: int, said: str) -> None:
        """Ends all other processes; returns once they know, or after seconds.

        The first one waits for this one's last sign: see `leave_ended`.

        Args:
          status: What they exit with.
          said: What they say, one line.
        """
        self._to_tell = self._to_tell or _End(status, said)
        self._wake.set()
        self._is_known.wait(timeout=_GOODBYE_S)

    def fail(self, error: BaseException) -> None:
        """Ends all other processes because of an error of this one.

        What the devices do together fails where a process is gone. Then that is what
        all of them say, this process too.
        """
        if self._to_tell is not None:
            return
        if isinstance(error, jax.errors.JaxRuntimeError):
            self._silent_s = _SUSPECT_S
            self._is_known.wait(timeout=_BLAME_S)
        if self._end is not None:
            if ending.owns_process():
                threading.Event().wait(2 * _GOODBYE_S)  # It is being ended.
            return
        first, *_ = [*str(error).splitlines(), type(error).__name__]
        status = getattr(error, "exit_code", 1)
        self.tell(status, f"{self.name} failed: {first}")

    def before_abort(self, address: str) -> None:
        """Ends this process, which is being aborted, if the first one is gone.

        Args:
          address: The host and port where the first process listens.
        """
        host, _, port = address.rpartition(":")
        where = host.strip("[]"), int(port)
        with (
            contextlib.suppress(OSError),
            socket.create_connection(where, _CONNECT_S) as first,
        ):
            # A process that is being killed still takes calls for a moment. One that
            # lives begins to speak.
            if first.recv(1):
                return
        self._end_process(
            _End(LOST, f"{self._name(0)} does not answer any more: {_IS_LOST}")
        )

    def shared_note(self, note: Callable[[str], None]) -> Callable[[str], None]:
        """Returns what prints a line in the first process, wherever it is called."""
        if self._process == 0:
            self._show = note
            return note
        return self._send

    def when_stop_asked(self, call: Callable[[], None]) -> None:
        """Has a function called once a signal has asked any process to stop."""
        self._on_stop = call

    def _send(self, line: str) -> None:
        self._note = line

    def _name(self, process: int) -> str:
        return f"process {process} of {self._count}"

    def _give_signs(self) -> None:
        for number in itertools.count():
            is_last = self._is_leaving.is_set()
            # Where the first process is gone nobody answers, which `_look` sees.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._round(None if is_last else number)
                self._answered_s = self._now()
            if is_last:
                return
            self._wake.wait(_SIGN_EVERY_S)
            self._wake.clear()

    def _round(self, number: int | None) -> None:
        """Gives a sign, tells what is to be told, and hears what others tell."""
        self._give_sign(number)
        if self._to_tell is not None and self._end is None:
            self._write(self._to_tell)
        self._hear()
        if self._process == 0:
            self._look_at_signs(self._signs())
            if number is None and self._to_tell is not None:
                self._wait_for_goodbyes()
        if self._on_stop is not None and self._is_stop_asked():
            self._on_stop()
            self._on_stop = None

    def _give_sign(self, number: int | None) -> None:
        sign = json.dumps([number, self._note])
        name = f"{_SIGNS}{self._process}"
        self._client.key_value_set(name, sign, allow_overwrite=True)

    def _signs(self) -> dict[int, list[Any]]:
        found = self._client.key_value_dir_get(_SIGNS)
        return {int(key.removeprefix(_SIGNS)): json.loads(sign) for key, sign in found}

    def _write(self, end: _End) -> None:
        # Another one may have been first.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{_ENDS}first", json.dumps(end))

    def _hear(self) -> None:
        for _, end in self._client.key_value_dir_get(_ENDS):
            self._end = _End(*json.loads(end))
            self._is_known.set()
            if self._to_tell is None and ending.owns_process():
                if self._process == 0:
                    self._wait_for_goodbyes()
                self._end_process(self._end)

    def _wait_for_goodbyes(self) -> None:
        """Waits for the others, to which the store is lost with this process."""
        until = self._now() + _GOODBYE_S
        others = set(range(1, self._count)) - self._missing
        while self._now() < until:
            signs = self._signs()
            if all(signs.get(process, [0])[0] is None for process in others):
                return
            time.sleep(_SIGN_EVERY_S / 10)

    def _look_at_signs(self, signs: dict[int, list[Any]]) -> None:
        now = self._now()
        for process in range(1, self._count):
            sign = signs.get(process, [0, ""])
            before, since_s = self._changed.get(process, ([0, ""], self._answered_s))
            if sign[1] and sign[1] != before[1]:
                # The terminal may have been hung up; this goes on.
                with contextlib.suppress(OSError):
                    self._show(f"{self._name(process)} {sign[1]}")
            if sign[0] is None or sign != before or process not in self._changed:
                self._changed[process] = (sign, now)
            elif now - since_s > self._silent_s and self._end is None:
                self._missing.add(process)
                self._write(self._lost(process, now - since_s))
                self._hear()

    def _is_stop_asked(self) -> bool:
        # It is an error that nobody has asked.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return bool(self._client.key_value_try_get(_STOP_ASKED))
        return False

    def _look(self) -> None:
        """Looks whether the store answers; in a thread of its own, as it may not."""
        while self._process and not self._is_leaving.wait(_SIGN_EVERY_S / 2):
            self._look_at_store()

    def _look_at_store(self) -> None:
        silent_s = self._now() - self._answered_s
        if silent_s > self._silent_s and self._end is None:
            self._end = self._lost(0, silent_s)
            self._is_known.set()
            if ending.owns_process():
                self._end_process(self._end)

    def _lost(self, process: int, silent_s: float) -> _End:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent_s))
        return _End(
            LOST,
            f"{self._name(process)} gives no sign since {since}, for {silent_s:.0f} s: "
            f"{_IS_LOST}",
        )

    def _end_process(self, end: _End) -> None:
        is_failure = end.status in (1, 2)
        ending.end(end.status, printable(end.said), resumes=not is_failure)


_joined: Peers | None = None


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Looks after the other processes, if jax has connected this one with any."""
    global _joined
    state = jax_distributed.global_state
    count = state.num_processes or 1
    if state.client is None or count == 1:
        yield
        return
    peers = _joined = Peers(state.client, state.process_id, count)
    peers.start()
    ending.before_exit(leave_ended)
    address = state.coordinator_address
    if state.process_id and address and ending.owns_process():
        ending.before_abort(lambda: peers.before_abort(address))
    try:
        yield
    finally:
        # The command of this process still has to say why it ends.
        if not (_joined.has_ended and ending.owns_process()):
            _joined.leave()


def has_ended() -> bool:
    """Whether this process of several leaves for itself: jax must not wait for it."""
    return _joined is not None and _joined.has_ended


def this_one() -> str:
    """Returns what this process of several is called; "" if it is alone."""
    return "" if _joined is None else _joined.name


def tell_others(status: int, said: str) -> None:
    """Ends all other processes of the run, if there are any; see `Peers.tell`."""
    if _joined is not None:
        _joined.tell(status, said)


def fail(error: BaseException) -> None:
    """Ends all other processes of the run by an error; see `Peers.fail`."""
    if _joined is not None:
        _joined.fail(error)


def leave_ended() -> None:
    """Gives the last sign of a process that said why it ends; see `Peers`."""
    if _joined is not None:
        _joined.leave_ended()


def shared_note(note: Callable[[str], None]) -> Callable[[str], None]:
    """Returns what prints a line in the first process; see `Peers.shared_note`."""
    return note if _joined is None else _joined.shared_note(note)


def when_stop_asked(call: Callable[[], None]) -> None:
    """Has a function called when a stop was asked; see `Peers.when_stop_asked`."""
    if _joined is not None:
        _joined.when_stop_asked(call)
