"""How the processes of a run end together, so that none waits for one that is gone.

A collective waits for every process, without a limit. So each process gives a sign
every two seconds in the key-value store of jax's runtime, which the first process
keeps. A process that ends writes its reason there. The others then end with that
sentence and exit status. The first process looks for processes without a sign. The
others notice by themselves that the store does not answer.

jax's own heartbeat would end them later, from C++, with a stack and without a name.
When the first process is killed, jax's runtime aborts the others at once, because it
needs the connection to that process. Our sentence follows its stack.
"""

import contextlib
import functools
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

LOST = 75  # The exit status: another attempt may succeed.
_SIGN_EVERY_S = 2.0
# A process without a sign for this long is lost. jax's runtime waits for 100 s.
_SILENT_S = 60.0
# The same after a collective failed, which a lost process may have caused.
_SUSPECT_S = 7.0
_BLAME_S = 15.0
# How long the end of a process is delayed so that all others hear of it.
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
    status: int  # Exit status of each process.
    said: str  # One sentence.


class Alone:
    """The only process of a run: no other one hears it or ends with it."""

    name = ""

    @property
    def has_ended(self) -> bool:
        """Whether this process ends by itself or because another one did."""
        return False

    def tell(self, status: int, said: str) -> None:
        """Ends all other processes; returns when they know, or after `_GOODBYE_S`."""

    def fail(self, error: BaseException) -> None:
        """Ends all other processes because of an error of this one."""

    def leave_ended(self) -> None:
        """Gives the last sign if this process has told why it ends."""

    def shared_note(self, note: Callable[[str], None]) -> Callable[[str], None]:
        """Returns a function that prints a line in the first process."""
        return note

    def when_stop_asked(self, call: Callable[[], None]) -> None:
        """Registers a function to call once a signal asks any process to stop."""


class Peers(Alone):
    """Gives signs of this process, and ends the command's process with the others.

    Attributes:
      silent_s: A process without a sign for this long is lost.
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
        self.name = self._name(process)
        self.silent_s = _SILENT_S
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
        self._signs_thread = threading.Thread(
            target=self._give_signs, name="signs", daemon=True
        )

    @property
    def has_ended(self) -> bool:
        return self._to_tell is not None or self._end is not None

    def start(self) -> None:
        self._signs_thread.start()
        threading.Thread(target=self._watch_store, name="peers", daemon=True).start()

    def leave(self) -> None:
        """Gives the last sign, so that nobody misses this process."""
        self._is_leaving.set()
        self._wake.set()
        self._signs_thread.join(timeout=_GOODBYE_S)

    # Not before: jax's runtime needs the first process, which ends then.
    def leave_ended(self) -> None:
        if threading.current_thread() is self._signs_thread:
            self._give_sign(None)
        elif self._to_tell is not None:
            self.leave()

    def tell(self, status: int, said: str) -> None:
        self._to_tell = self._to_tell or _End(status, said)
        self._wake.set()
        self._is_known.wait(timeout=_GOODBYE_S)

    def fail(self, error: BaseException) -> None:
        if self._to_tell is not None:
            return
        # A collective fails when a process is gone. All then report that process.
        if isinstance(error, jax.errors.JaxRuntimeError):
            self.silent_s = _SUSPECT_S
            self._is_known.wait(timeout=_BLAME_S)
        if self._end is not None:
            if ending.owns_process():
                threading.Event().wait(2 * _GOODBYE_S)  # It is being ended.
            return
        first, *_ = [*str(error).splitlines(), type(error).__name__]
        status = getattr(error, "exit_code", 1)
        self.tell(status, f"{self.name} failed: {first}")

    def before_abort(self, address: str) -> None:
        """Ends this process, which is being aborted, if the first one is gone."""
        host, _, port = address.rpartition(":")
        where = host.strip("[]"), int(port)
        with (
            contextlib.suppress(OSError),
            socket.create_connection(where, _CONNECT_S) as first,
        ):
            # A process that is being killed still accepts connections for a moment.
            # A live one sends data.
            if first.recv(1):
                return
        self._end_process(
            _End(LOST, f"{self._name(0)} does not answer any more: {_IS_LOST}")
        )

    def shared_note(self, note: Callable[[str], None]) -> Callable[[str], None]:
        if self._process == 0:
            self._show = note
            return note
        return functools.partial(setattr, self, "_note")

    def when_stop_asked(self, call: Callable[[], None]) -> None:
        self._on_stop = call

    def _name(self, process: int) -> str:
        return f"process {process} of {self._count}"

    def _give_signs(self) -> None:
        for number in itertools.count():
            is_last = self._is_leaving.is_set()
            # If the first process is gone, nobody answers; `look` notices that.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self.beat(None if is_last else number)
            if is_last:
                return
            self._wake.wait(_SIGN_EVERY_S)
            self._wake.clear()

    def beat(self, number: int | None) -> None:
        """Gives a sign, tells the others why this process ends, and hears them."""
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
        self._answered_s = self._now()

    def _give_sign(self, number: int | None) -> None:
        sign = json.dumps([number, self._note])
        name = f"{_SIGNS}{self._process}"
        self._client.key_value_set(name, sign, allow_overwrite=True)

    def _signs(self) -> dict[int, list[Any]]:
        found = self._client.key_value_dir_get(_SIGNS)
        return {int(key.removeprefix(_SIGNS)): json.loads(sign) for key, sign in found}

    def _write(self, end: _End) -> None:
        # Another process may have been first.
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
        """Waits for the others, which lose the store with this process."""
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
                # The terminal may have been hung up; the run continues.
                with contextlib.suppress(OSError):
                    self._show(f"{self._name(process)} {sign[1]}")
            if sign[0] is None or sign != before or process not in self._changed:
                self._changed[process] = (sign, now)
            elif now - since_s > self.silent_s and self._end is None:
                self._missing.add(process)
                self._write(self._lost(process, now - since_s))
                self._hear()

    def _is_stop_asked(self) -> bool:
        # The store raises an error if nobody has asked.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return bool(self._client.key_value_try_get(_STOP_ASKED))
        return False

    def _watch_store(self) -> None:
        # In its own thread, as a call of the store may hang.
        while self._process and not self._is_leaving.wait(_SIGN_EVERY_S / 2):
            self.look()

    def look(self) -> None:
        """Ends this process if the store has not answered for too long."""
        silent_s = self._now() - self._answered_s
        if silent_s > self.silent_s and self._end is None:
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


_here: Alone = Alone()


def here() -> Alone:
    """Returns the process that runs this, as `joined` has made it."""
    return _here


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Watches the other processes if jax has connected this one with any."""
    global _here
    state = jax_distributed.global_state
    count = state.num_processes or 1
    if state.client is None or count == 1:
        yield
        return
    peers = _here = Peers(state.client, state.process_id, count)
    peers.start()
    ending.before_exit(peers.leave_ended)
    address = state.coordinator_address
    if state.process_id and address and ending.owns_process():
        ending.before_abort(lambda: peers.before_abort(address))
    try:
        yield
    finally:
        # The command of this process still has to print why it ends.
        if not (peers.has_ended and ending.owns_process()):
            peers.leave()
