"""Several processes that echo together, each on devices of its own.

Every process reads its own rows, and writes and draws them on its own devices. So no
data is sent between processes. They agree on two things through the key-value store of
jax's runtime:

- A fresh batch is passed on once every process has one (`AgreedIterator`). So all
  processes end, or fail, at the same batch. This is done while batches are read ahead.
- The first process decides for all whether an adaptive echo takes fresh data
  (`Meeting.follow_first`). The others ask for this before each batch.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # The store has no public name.
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from echo_jax.echo.reader import ReadAhead
from echo_jax.echo.stateful import PeekedIterator

__all__ = ["AgreedIterator", "Meeting", "Placement"]

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
    """The devices of this process, and which rows of a batch they hold.

    Attributes:
      mesh: This process's devices.
      axes: The axes of ``mesh`` that split the rows; all if there are none.
      shards: The parts of a batch that are on this process's devices, of `num_shards`.
      num_shards: Parts of a batch over all processes.
      sharding: The sharding of a batch over several processes; None in one process.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    shards: tuple[int, ...]
    num_shards: int
    sharding: NamedSharding | None = None

    @classmethod
    def of(cls, mesh: Mesh, axes: tuple[str, ...]) -> "Placement":
        """Returns the place of this process in a mesh, whose ``axes`` split the rows.

        Raises:
          ValueError: This process has no device there, or more copies of some rows than
            of others.
        """
        names: Any = axes or mesh.axis_names
        num_shards = int(np.prod([mesh.shape[name] for name in names]))
        if not mesh.is_multi_process:
            return cls(mesh, axes, tuple(range(num_shards)), num_shards)
        rows = names if len(names) > 1 else names[0]
        sharding = NamedSharding(mesh, PartitionSpec(rows))
        devices: dict[int, list[Any]] = {}
        for device, index in sharding.addressable_devices_indices_map(
            (num_shards,)
        ).items():
            assert index is not None
            devices.setdefault(index[0].start or 0, []).append(device)
        shards = tuple(sorted(devices))
        copies = {len(devices[shard]) for shard in shards}
        if len(copies) != 1:
            raise ValueError(
                f"process {jax.process_index()} holds {sorted(copies)} copies of parts "
                f"of a batch in mesh={mesh}; use a mesh with devices of this process "
                "that holds equally many copies of each"
            )
        own = np.array([devices[shard] for shard in shards])
        local = Mesh(own, ("rows", "copies"))
        return cls(local, ("rows",), shards, num_shards, sharding)

    def own_lanes(self, num_lanes: int) -> tuple[int, ...]:
        """Returns the lanes of this process; 0 lanes are one per shard."""
        each, rest = divmod(num_lanes or self.num_shards, self.num_shards)
        if rest:
            fits = (each + 1) * self.num_shards
            raise ValueError(
                f"num_lanes={num_lanes} is not a multiple of {self.num_shards}, the "
                f"shards of a batch; use {fits}"
            )
        return tuple(s * each + lane for s in self.shards for lane in range(each))

    def over_all(self, count: int) -> int:
        """Returns a count of all processes, from that of this process."""
        return count * self.num_shards // len(self.shards)

    def joined(self, batch: Any) -> Any:
        """Returns a batch of all processes, from the rows that are here."""
        sharding = self.sharding
        if sharding is None:
            return batch

        def join(rows: jax.Array) -> jax.Array:
            return jax.make_array_from_single_device_arrays(
                (self.over_all(len(rows)), *rows.shape[1:]),
                sharding,
                [shard.data for shard in rows.addressable_shards],
            )

        return jax.tree.map(join, batch)


class Meeting:
    """The processes that share an echo; all make their echoes in the same order."""

    def __init__(self, mesh: Mesh, timeout_s: float):
        self._client: Any = distributed.global_state.client
        self.processes = sorted({device.process_index for device in mesh.devices.flat})
        self._me, self.timeout_s = jax.process_index(), timeout_s
        self._name = f"echo_jax/echo/{next(_numbers)}"
        self._restart(0)

    def _restart(self, sitting: int) -> None:
        # Sittings count the states that the echo went to. Words are said in rounds.
        self._sitting, self._round = sitting, 0
        self._words: dict[int, Any] = {}
        self._decisions = itertools.count()

    def leave(self) -> None:
        """Ends the wait of a thread in `exchange`; the others must leave, too."""
        self._restart(self._sitting + 1)

    def exchange(self, word: Any = None) -> dict[int, Any]:
        """Waits until all processes are here; returns their words, but no None."""
        sitting, number = self._sitting, self._round
        self._round += 1
        self._say(number, word)
        began = time.monotonic()
        while True:
            found = self._found()
            missing = [
                process
                for process, (at, reached, _) in found.items()
                if at != sitting or reached < number
            ]
            if not missing:
                break
            waited_s = time.monotonic() - began
            if self._sitting != sitting:
                raise InterruptedError("this echo goes to another state")
            if waited_s > self.timeout_s + _LONGER_S:
                text = (
                    f"processes {missing} gave no fresh batch for {waited_s:.0f} s, "
                    f"and process {self._me} waits for them. See what their loaders "
                    "wait for, or use a larger timeout_s"
                )
                self._say(number, text)  # Those that come later must not go on.
                raise TimeoutError(text)
            time.sleep(max(1e-3, waited_s / 20))
        here = str(number)  # JSON's keys are strings.
        return {
            process: said[here] for process, (*_, said) in found.items() if here in said
        }

    def _say(self, number: int, word: Any) -> None:
        """Tells the others that this process is in a round, and its word there."""
        if word is not None:
            self._words[number] = word
        self._client.key_value_set(
            f"{self._name}/at/{self._me}",
            json.dumps([self._sitting, number, self._words]),
            allow_overwrite=True,
        )

    def _found(self) -> dict[int, Any]:
        """Returns the sitting, the round and the words of every process."""
        at = f"{self._name}/at/"
        found = dict.fromkeys(self.processes, (-1, -1, {}))
        for key, value in self._client.key_value_dir_get(at):
            found[int(key.rsplit("/", 1)[1])] = json.loads(value)
        return found

    def follow_first(self, ask: Callable[[], bool]) -> bool:
        """Returns the first process's decision, which is ``ask()`` there."""
        group, number = divmod(next(self._decisions), _GROUP)
        where = f"{self._name}/decided/{self._sitting}"
        key = f"{where}/{group}/{number}"
        if self._me != self.processes[0]:
            limit_ms = round(1e3 * (self.timeout_s + _LONGER_S))
            try:
                return self._client.blocking_key_value_get(key, limit_ms) == "1"
            except jax.errors.JaxRuntimeError as error:
                raise TimeoutError(
                    f"process {self.processes[0]} decided nothing for "
                    f"{limit_ms / 1e3:.0f} s, and process {self._me} follows it. See "
                    "what it waits for, or use a larger timeout_s"
                ) from error
        decided = True  # After a failure, too: the others then meet the same one.
        try:
            decided = ask()
        finally:
            self._client.key_value_set(key, str(int(decided)))
        if not number:
            self._client.key_value_delete(f"{where}/{group - 4}")
        return decided

    def check_alike(self, make: Callable[[], tuple[str, int]]) -> int:
        """Returns the least number that ``make`` returns in any process.

        Raises:
          ValueError: It returns another text elsewhere.
        """
        try:
            text, number = make()
        except Exception as error:
            self.exchange(["", f"{type(error).__name__}: {error}"])
            raise
        said = self.exchange([text, number])
        for process, (other, found) in said.items():
            if not other:
                raise RuntimeError(f"process {process} cannot make the echo: {found}")
            if other != text:
                raise ValueError(
                    "the processes of a mesh must make the same echo. Process "
                    f"{self._me} makes one of {text:.300}, and process {process} makes "
                    f"one of {other:.300}"
                )
        return min(each for _, each in said.values())


class AgreedIterator(PeekedIterator):
    """Passes a value on once all processes have one, so all end or fail together.

    Attributes:
      check: Raises if this process cannot use a value.
    """

    def __init__(self, iterator: Iterator[Any], meeting: Meeting):
        # A process that is ahead reads on, so that slow batches even out.
        ahead = ReadAhead(iterator, _AHEAD, meeting.timeout_s)
        super().__init__(ahead)
        self.close = ahead.close
        self.check: Callable[[Any], object] = lambda value: None
        self._meeting, self._passed, self._agreed = meeting, 0, False
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
        word = failure = None
        try:
            self.check(super().peek())
        except StopIteration:
            word = "ended"
        except Exception as error:
            word, failure = f"{type(error).__name__}: {error}", error
        try:
            said = self._meeting.exchange(word)
        except TimeoutError as error:
            self._end = error
            raise
        if failure is not None:
            raise failure
        ended = [process for process, word in said.items() if word == "ended"]
        for process in sorted(set(said) - set(ended)):
            raise RuntimeError(
                f"the loader of process {process} failed, so no process gets fresh "
                f"batch {self._passed}: {said[process]}"
            )
        if len(ended) == len(self._meeting.processes):
            self._end = StopIteration()
        elif ended:
            self._end = ValueError(
                f"the loaders of processes {ended} ended after {self._passed} batches, "
                "and the others have more; give every process equally many batches"
            )
        if self._end is not None:
            raise self._end

    def leave(self) -> None:
        """Ends a wait for the other processes."""
        self._meeting.leave()

    def _set_state(self, state: Any) -> None:
        super()._set_state(state)
        self._agreed, self._end, self._passed = False, None, 0
