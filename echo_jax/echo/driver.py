"""Runs an echo with a reader, a plan and a store, one output at a time.

The order of one turn is a contract. The driver

1. lets the plan decide, if no decided uses are left, and waits until the reader has
   the rows that the output needs. A failure of the upstream changes nothing here, and
   the call may be repeated;
2. moves the rows to their slots, and reads the output. After a failure or an
   interruption here, the echo refuses all further use, with the cause, until it goes
   to a state.

So an output is made as a whole or not at all, and tags, items and counts agree.
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Any, NamedTuple, Protocol

import numpy as np

from echo_jax.echo.arguments import integer
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.plans.base import Decision, Plan, Restored, Uses
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, check_spec
from echo_jax.echo.stats import Counts
from echo_jax.echo.upstream import Element, Reader


class Store(Protocol):
    """Slots that hold items; a restore writes ``rewritten_rows`` at a time."""

    rewritten_rows: int
    eager: bool  # whether rows that are ready are written before they are needed

    def write(self, slots: np.ndarray, taken: list[Element]) -> None:
        """Puts the rows of `Reader.take` into slots, lane by lane, ``int32[G, n]``.

        A restore also gives rows with the slot ``num_slots``, which nobody reads.
        """
        ...

    def clear(self) -> None:
        """Forgets all items."""
        ...


class Turn:
    """Lets one thread at a time use an echo, until a close or a broken change."""

    def __init__(self):
        self.consistent = True  # False while a change is being made
        self.ended = False  # the last output was handed out
        self._warned = False
        # The thread that has the turn. Every change of a dict is one step, so no signal
        # comes between taking the turn and recording it.
        self._holder: dict[None, int] = {}
        self._closed = False
        self._cause: BaseException | None = None

    def __enter__(self) -> None:
        me, holder = get_ident(), self._holder
        if holder or holder.setdefault(None, me) != me:
            if holder.get(None) != me:
                raise ValueError(
                    "this echo is already in use by another thread; give each thread "
                    "an echo of its own, or take turns with a lock"
                )
            # Left behind by an interruption before the turn could end.
            self.consistent = False
        if self._closed:
            holder.clear()
            raise ValueError("this echo is closed; make another one")

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.consistent, self._cause = True, None
        elif not self.consistent and self._cause is None:
            self._cause = error
        self._holder.clear()

    def check(self) -> None:
        """Raises RuntimeError if a change was interrupted, and no state was set."""
        if not self.consistent:
            raise RuntimeError(
                "this echo was interrupted while it made an output, so nothing more "
                "can come out of it; go to a saved state, or start again"
            ) from self._cause

    def warn_if_ended(self) -> None:
        """Warns once if an echo that has ended is iterated again."""
        if self.ended and not self._closed and not self._warned:
            self._warned = True
            warnings.warn(
                "this echo has ended, and its loader is an iterator, which cannot be "
                "started again. Give the echo the loader itself, or make an echo for "
                "each epoch.",
                stacklevel=3,
            )

    def close(self) -> None:
        """Refuses all further turns."""
        self._closed = True


class Epoch(NamedTuple):
    """A pass over the upstream, and what earlier ones had, unless the plan goes on."""

    number: int = 0
    rows: int = 0  # of each lane
    fresh: int = 0
    uses: int = 0
    repeats: int = 0


class Driver:
    """Runs an echo; the owner of a driver holds its `turn` during every output."""

    def __init__(
        self,
        reader: Reader,
        plan: Plan,
        store: Store,
        turn: Turn | None = None,
        agree: Callable[[Callable[[], bool]], bool] = lambda ask: ask(),
    ):
        # ``agree`` decides with other processes whether optional rows are taken.
        self.plan = self._first_plan = plan
        self.epoch = Epoch()
        self._agree = agree
        self.turn = turn or Turn()
        self._reader = reader
        self._store = store
        self._follow(Uses.none())

    def _follow(self, decision: Decision | Uses) -> None:
        """Goes on with a decision, or with uses whose rows are written."""
        if isinstance(decision, Uses):
            row, slots = self._reader.row, decision.slots[:, :0]
            decision = Decision.at_once(decision, row, slots)
        self._decision, self.uses = decision, decision.uses
        self._at, self._first, self._size = 0, self._reader.row, self.uses.size

    @property
    def counts(self) -> Counts:
        counts, before = self.plan.counts(self._at), self.epoch[2:]
        return Counts(*map(sum, zip(counts, before, strict=True)))

    @property
    def log(self) -> DecisionLog | None:
        return getattr(self.plan, "log", None)

    @property
    def can_restart(self) -> bool:
        """Whether there may be another pass over the upstream."""
        return self._reader.can_restart

    @property
    def waited_s(self) -> float:
        return self._reader.waited_s

    @property
    def reading_s(self) -> tuple[float, int]:
        return self._reader.reading_s

    @property
    def ready_batches(self) -> int:
        return self._reader.rows_ahead // self.plan.batch

    def next(self, count: int) -> tuple[int, int] | None:
        """Makes the next uses ready to be read, fewer at the end, and none after it.

        Returns:
          Their start and stop in `uses`.
        """
        reader, turn = self._reader, self.turn
        reader.check_process()
        while True:
            if self._at + count > self._size and not self._decide(count):
                return None
            at, stop = self._at, min(self._at + count, self._size)
            row = reader.row
            missing = self._decision.rows_for(at, stop) - row
            if missing <= 0:
                break
            reader.ensure(missing)
            if reader.rows >= missing:
                turn.consistent = False
                # Rows that are ready are written together as far as slots are free.
                most = int(self._decision.most[at]) - row
                rows = min(reader.rows, most) if self._store.eager else missing
                slots = self._decision.slots[:, row - self._first :][:, :rows]
                self._store.write(slots, reader.take(rows, self._anchor))
                reader.read_on()
                break
            turn.consistent = False
            self.plan.settle(at, row)
            self.plan.end(reader.rows)
            self._follow(Uses.none())
            turn.consistent = True
        turn.consistent = False
        self._at = stop
        return at, stop

    def _decide(self, count: int) -> bool:
        """Decides at least the next ``count`` uses, fewer at the end; none after it."""
        plan, reader, turn = self.plan, self._reader, self.turn
        # A plan may look ahead in iterators, which an interruption would end.
        turn.consistent = False
        plan.settle(self._at, reader.row)
        rows, may, then = plan.need(count)
        turn.consistent = True
        if not rows and may and self._agree(lambda: reader.is_ready(may)):
            rows = may
        if rows or then:
            reader.ensure(rows + then)  # In another process they may come later.
        turn.consistent = False
        if rows + then > reader.rows:
            plan.end(reader.rows)
            rows = min(rows, reader.rows)
        decision = plan.decide(count, rows)
        if decision is not None:
            self._follow(decision)
        turn.consistent = True
        return decision is not None

    def _anchor(self) -> int:
        """Returns the oldest row that a restore has to read again."""
        self.plan.settle(self._at, self._reader.row)
        return self.plan.anchor()

    def get_state(self) -> dict[str, Any]:
        """Returns the plan's state, and the upstream's at the oldest item in use."""
        with self.turn:
            self.turn.check()
            self.turn.consistent = False
            self.plan.settle(self._at, self._reader.row)
            plan = self.plan.get_state()
            self.turn.consistent = True
            anchor = self.plan.anchor()
            upstream, first, read_in, later = self._reader.state_before(anchor)
            skip = anchor - first
        state = {"plan": plan, "skip": skip, "upstream": upstream}
        if self.can_restart:
            passes = [list(each) for each in later]
            ended = int(self.turn.ended)
            more = {"ended": ended, "upstream": read_in, "later": passes}
            state["epoch"] = self.epoch._asdict() | more
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a state."""
        # The items in use are read from the upstream again. A refused state changes
        # nothing.
        with self.turn:
            if (
                not isinstance(state, Mapping)
                or {*state, "epoch"} != {"epoch", "plan", "skip", "upstream"}
                or type(state["skip"]) is not int
                or state["skip"] < 0
            ):
                raise ValueError(
                    f"{state!r:.200} is not the state of an echo: epoch, plan, "
                    "upstream, and skip, an integer of at least 0; give what get_state "
                    "returned"
                )
            self._reader.check_resumable()
            epoch, ended, read_in, later = _epoch_of(state.get("epoch", {}))
            plan = self._plan_of(epoch)
            restored = plan.set_state(state["plan"])
            self.turn.consistent = False
            self.plan, self.epoch = plan, epoch
            first = restored.first - state["skip"]
            self._reader.restore(state["upstream"], first, read_in)
            self._store.clear()
            self._read_again(restored, state["skip"], ended, later)
            self._follow(restored.pending or Uses.none())
            self.turn.ended = ended

    def _plan_of(self, epoch: Epoch) -> Plan:
        """Returns a plan of a pass over the upstream."""
        plan = self.plan if self.plan.goes_on else self._first_plan
        if epoch.number or plan.goes_on:
            return plan.of_epoch(epoch.number, epoch.rows, epoch.uses)
        return copy.copy(plan)

    def begin_epoch(self) -> None:
        """Starts another pass over an upstream that can be started again."""
        with self.turn:
            self.turn.check()
            self.turn.consistent = False
            epoch = self.epoch._replace(number=self.epoch.number + 1)
            if self.plan.goes_on:
                self._reader.begin_epoch()
            else:
                rows = epoch.rows + self._reader.row
                epoch = Epoch(epoch.number, rows, *self.counts)
                self._reader.begin_epoch(0)
            self.epoch = epoch
            self.plan = self._plan_of(epoch)
            self._follow(Uses.none())
            self.turn.ended = False

    def _read_again(
        self, restored: Restored, skip: int, ended: bool, later: Mapping[int, Any]
    ) -> None:
        """Reads the items in use again, and the rows before or between them."""
        at, end = -skip, restored.slots.shape[1]
        most = self._store.rewritten_rows
        while at < end:
            wanted = min(-at if at < 0 else end - at, most)
            self._reader.ensure(wanted)
            rows = min(self._reader.rows, wanted)
            if not rows and self._reader.epoch < self.epoch.number:
                self._reader.begin_epoch(state=later.get(self._reader.epoch + 1))
                continue
            if not rows:
                raise ValueError(
                    f"the upstream ended after {restored.first + at} items, but the "
                    f"state was saved after {restored.first + end}; restore it over "
                    "the same data"
                )
            taken = self._reader.take(rows, self.plan.anchor)
            if at >= 0:
                self._store.write(restored.slots[:, at : at + rows], taken)
            at += rows
        while ended or self._reader.epoch < self.epoch.number:
            self._reader.ensure(1)
            if self._reader.rows:
                raise ValueError(
                    f"the upstream goes on after {restored.first + end} items, but it "
                    "had ended when the state was saved; restore it over the same data"
                )
            if self._reader.epoch == self.epoch.number:
                break
            self._reader.begin_epoch(state=later.get(self._reader.epoch + 1))
        self._reader.read_on()

    def close(self) -> None:
        """Stops reading ahead, and refuses all further use."""
        self.turn.close()
        self._reader.close()


def _epoch_of(record: Any) -> tuple[Epoch, bool, int, dict[int, Any]]:
    """Returns the pass of a state, whether it had ended, and its upstream's passes."""
    # States of iterators, and of earlier versions, have one pass.
    values = Epoch()._asdict() | {"ended": 0, "upstream": 0, "later": []}
    try:
        values |= record
        later, read_in = dict(values.pop("later")), values.pop("upstream")
        ended, epoch = values.pop("ended"), Epoch(**values)
    except (TypeError, ValueError) as error:
        raise _damaged_epoch(record) from error
    are_integers = {*map(type, [*epoch, read_in, ended, *later])} == {int}
    if not are_integers or min(epoch) < 0 or not 0 <= read_in <= epoch.number:
        raise _damaged_epoch(record)
    return epoch, bool(ended), read_in, later


def _damaged_epoch(record: Any) -> ValueError:
    return ValueError(f"{record!r:.200} is not the epoch of a state; it is damaged")


def prefetched(spec: AnySpec, prefetch: int | None, default: int = 0) -> int:
    """Returns the number of batches of fresh items to read ahead."""
    check_spec(spec)
    is_adaptive = isinstance(spec, AdaptiveSpec)
    if prefetch is None:
        return max(2, default) if is_adaptive else default
    prefetch = integer("prefetch", prefetch, 0)
    if is_adaptive and not prefetch and not spec.replay:
        raise ValueError(
            "prefetch=0 reads fresh items when they are asked for, so an adaptive echo "
            "would find all of them ready and repeat none; use prefetch=2"
        )
    return prefetch
