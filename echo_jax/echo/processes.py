"""Several processes that echo together, each on devices of its own.

Every process reads its own rows, and writes and draws them on its own devices. So no
data is sent between processes. They agree on two things through the key-value store of
jax's runtime, both in `AgreedIterator`:

- A fresh batch is passed on once every process has one. So all processes end, or fail,
  at the same batch. This is done while batches are read ahead.
- The first process decides for all whether an adaptive echo takes fresh data. The
  others ask for this before each batch.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import distributed  # The store has no public name.
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from echo_jax.echo.upstream import ReadAhead

# The number of the next echo: processes make the same echoes in the same order.
_numbers = itertools.count()
# Host batches that each process reads before the others have theirs.
_AHEAD = 8
# Waits for other processes last longer than those for this process's own loader.
_LONGER_S = 5
# Decisions are deleted in groups of this size, four groups later.
_GROUP = 1024


@dataclass(frozen=True)
class Placement:
    """The rows of a batch that the devices of this process hold."""

    sharding: NamedSharding  # of a batch over all processes
    own: NamedSharding  # of this process's rows over its devices
    lanes: tuple[int, ...]  # this process's lanes, of ``num_lanes``
    num_lanes: int

    @classmethod
    def of(cls, sharding: NamedSharding, num_lanes: int = 0) -> "Placement":
        """Returns the place of this process; 0 lanes are one per part of a batch."""
        size = sharding.num_devices
        parts = size // sharding.shard_shape((size,))[0]
        each, rest = divmod(num_lanes or parts, parts)
        if rest:
            raise ValueError(
                f"num_lanes={num_lanes} is not a multiple of {parts}, the parts into "
                f"which a batch is split; use {(each + 1) * parts}"
            )
        devices: dict[int, list[Any]] = {}
        for device, index in sharding.addressable_devices_indices_map((parts,)).items():
            assert index is not None
            devices.setdefault(index[0].start or 0, []).append(device)
        here, own = sorted(devices), sharding
        if not sharding.is_fully_addressable:
            copies = {len(each) for each in devices.values()}
            if len(copies) != 1:
                raise ValueError(
                    f"process {jax.process_index()} holds {sorted(copies)} copies of "
                    f"parts of a batch in {sharding}; use a mesh with devices of this "
                    "process that holds equally many copies of each"
                )
            local = Mesh([devices[part] for part in here], ("rows", "copies"))
            own = NamedSharding(local, PartitionSpec("rows"))
        lanes = tuple(part * each + lane for part in here for lane in range(each))
        return cls(sharding, own, lanes, parts * each)

    def over_all(self, count: int) -> int:
        """Returns a count of all processes, from this process's count."""
        return count * self.num_lanes // len(self.lanes)

    def joined(self, batch: Any) -> Any:
        """Returns a batch of all processes, from the rows that are here."""
        if self.own is self.sharding:
            return batch

        def join(rows: jax.Array) -> jax.Array:
            return jax.make_array_from_single_device_arrays(
                (self.over_all(len(rows)), *rows.shape[1:]),
                self.sharding,
                [shard.data for shard in rows.addressable_shards],
            )

        return jax.tree.map(join, batch)


class AgreedIterator(ReadAhead):
    """Passes a value on once all processes have one, so all end or fail together."""

    def __init__(
        self, iterator: Iterator[Any], sharding: NamedSharding, timeout_s: float
    ):
        # A process that is ahead reads on, so that slow batches even out.
        super().__init__(iterator, _AHEAD, timeout_s)
        # Raises if this process cannot use a value.
        self.check: Callable[[Any], object] = lambda value: None
        self._client: Any = distributed.global_state.client
        self._processes = sorted({each.process_index for each in sharding.device_set})
        self._me, self._timeout_s = jax.process_index(), timeout_s + _LONGER_S
        self._name = f"echo_jax/echo/{next(_numbers)}"
        # It counts the states that the echo went to.
        self._sitting, self._round, self._decisions = 0, 0, itertools.count()
        self._passed, self._agreed, self.slowest = 0, False, self._me
        self._end: Exception | None = None

    def peek(self) -> Any:
        if not self._agreed:
            self._agree()
            self._agreed, self._passed = True, self._passed + 1
        return super().peek()

    def __next__(self) -> Any:
        self.peek()
        self._agreed = False
        return super().__next__()

    def _agree(self) -> None:
        if self._end is not None:
            raise self._end

        def has_value() -> tuple[bool, float]:
            read_s, num_read = self.reading_s
            try:
                self.check(super(AgreedIterator, self).peek())
            except StopIteration:
                return False, 0.0
            return True, read_s / max(1, num_read)

        found = self._together(f"gets fresh batch {self._passed}", has_value)
        self.slowest = max(found, key=lambda process: found[process][1])
        ended = sorted(process for process, (has, _) in found.items() if not has)
        if len(ended) == len(found):
            self._end = StopIteration()
        elif ended:
            self._end = ValueError(
                f"the loaders of processes {ended} ended after {self._passed} batches, "
                "and the others have more; give every process equally many batches"
            )
        if self._end is not None:
            raise self._end

    def check_alike(self, make: Callable[[], tuple[str, int]]) -> int:
        """Returns the least number of ``make`` in any process, if its text is alike."""
        said = self._together("makes the echo", make)
        mine, _ = said[self._me]
        for process, (text, _) in said.items():
            if text != mine:
                raise ValueError(
                    "the processes of a mesh must make the same echo. Process "
                    f"{self._me} makes one of {mine:.300}, and process {process} makes "
                    f"one of {text:.300}"
                )
        return min(number for _, number in said.values())

    def _together(self, goal: str, make: Callable[[], Any]) -> dict[int, Any]:
        """Returns what ``make`` returns in every process; all fail if one does."""
        made = failure = None
        try:
            made = make()
        except Exception as error:
            failure = error
        text = "" if failure is None else f"{type(failure).__name__}: {failure}"
        said = self._exchange([made, text])
        if failure is not None:
            raise failure
        for process, (_, text) in said.items():
            if text:
                raise RuntimeError(
                    f"process {process} failed, so no process {goal}: {text}"
                )
        return {process: made for process, (made, _) in said.items()}

    def _exchange(self, word: Any) -> dict[int, Any]:
        """Waits until all processes are in this round; returns their words."""
        sitting, number = self._sitting, self._round
        self._round += 1
        # Who is a round further has read all words of this one, so two places suffice.
        where = f"{self._name}/{sitting}/said/{number % 2}/"

        def say(word: Any) -> None:
            key, value = f"{where}{self._me}", json.dumps([number, word])
            self._client.key_value_set(key, value, allow_overwrite=True)

        say(word)
        began = time.monotonic()
        while True:
            said = {}
            for key, value in self._client.key_value_dir_get(where):
                then, word = json.loads(value)
                if then == number:
                    said[int(key.rsplit("/", 1)[1])] = word
            missing = [each for each in self._processes if each not in said]
            if not missing:
                return said
            waited_s = time.monotonic() - began
            if self._sitting != sitting:
                raise InterruptedError("this echo goes to another state")
            if waited_s > self._timeout_s:
                text = (
                    f"processes {missing} gave no fresh batch for {waited_s:.0f} s, "
                    f"and process {self._me} waits for them. See what their loaders "
                    "wait for, or use a larger timeout_s"
                )
                say([None, text])  # Those that come later must not go on.
                self._end = TimeoutError(text)
                raise self._end
            time.sleep(max(1e-3, waited_s / 20))

    def follow_first(self, ask: Callable[[], bool]) -> bool:
        """Returns the first process's decision, which is ``ask()`` there."""
        group, number = divmod(next(self._decisions), _GROUP)
        where = f"{self._name}/{self._sitting}/decided"
        key = f"{where}/{group}/{number}"
        if self._me != self._processes[0]:
            limit_ms = round(1e3 * self._timeout_s)
            try:
                return self._client.blocking_key_value_get(key, limit_ms) == "1"
            except jax.errors.JaxRuntimeError as error:
                raise TimeoutError(
                    f"process {self._processes[0]} decided nothing for "
                    f"{self._timeout_s} s, and process {self._me} follows it. See what "
                    "it waits for, or use a larger timeout_s"
                ) from error
        decided = True  # After a failure, too: the others then meet the same one.
        try:
            decided = ask()
        finally:
            self._client.key_value_set(key, str(int(decided)))
        if not number:
            self._client.key_value_delete(f"{where}/{group - 4}")
        return decided

    def leave(self) -> None:
        """Ends a wait for the other processes, which must leave, too."""
        self._sitting, self._round = self._sitting + 1, 0
        self._decisions = itertools.count()

    def _restart(self) -> None:
        super()._restart()
        self._agreed, self._end = False, None

    def _set_state(self, state: Any) -> None:
        super()._set_state(state)
        self._agreed, self._end, self._passed = False, None, 0
