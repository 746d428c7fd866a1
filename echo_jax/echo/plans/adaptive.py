"""Adaptive echo: use fresh items if they are ready, none over ``max_uses`` times.

For every batch, take fresh items if they are ready. Then use the items below `max_uses`
that were unused for longest. Wait only if these are too few for a batch. The plan needs
no knowledge of the rates.

The longest unused items are repeated, because the value of a repeat follows its lag
(Choi et al. 2019, figure 7). When storage stalls, items take turns until each was used
``max_uses`` times. If the least used items came first, the newest ones would be
repeated, and in a stall items would run out earlier (docs/design.md).

The buffer of each lane is a ring of its last items. Fresh items are used first, in
their order. The plan asks for more only if fewer unused items are waiting than the next
batch uses, so no item is lost unused. Repeats are chosen at random among the longest
unused items. The cost of a batch does not grow with the buffer.

With ``min_uses`` above 1, fresh items are optional only if the items that were used
have had so many uses on average, and each that would give way has had them itself.
Items that give way next are repeated before the longest unused ones. So while data is
always ready, every item is used ``min_uses`` times, as far apart as the buffer allows.

A log records with one bit per batch whether fresh items were taken before it. The
sequence of uses is a function of the spec, the log, and the end of the upstream. With
``replay``, the plan repeats the decisions of a log and records them again; after the
end of the log it decides by the ready items.

After the end of the upstream, batches go on until all items are at `max_uses`. A batch
is smaller if fewer items are left.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from echo_jax.echo.decision_log import DecisionLog, Recorder
from echo_jax.echo.keys import fingerprint, sequence
from echo_jax.echo.plans.base import Decision, Need, Restored, Uses
from echo_jax.echo.plans.lanes import Lanes
from echo_jax.echo.plans.lru import LeastRecentlyUsed
from echo_jax.echo.plans.ring import RingPlan
from echo_jax.echo.spec import AdaptiveSpec

__all__ = ["AdaptivePlan"]

# Goes up whenever the same arguments and log yield another sequence than before.
_SEQUENCE_VERSION = 3
_STATE_KEYS = {"fresh", "log", "pending", "plan"}
_TOO_FEW = "the log of this state takes too few items for its batches; it is damaged"


class AdaptivePlan(RingPlan):
    """The plan of an adaptive echo; a `Plan`.

    Example:
      >>> plan = AdaptivePlan(AdaptiveSpec(max_uses=2, buffer=8, batch_size=2))
      >>> plan.need(2), plan.decide(2, rows=2).uses.fresh_index.tolist()
      (Need(must=2, may=0), [[0, 1]])
      >>> plan.need(2)  # fresh items are optional: the buffer has enough
      Need(must=0, may=2)
      >>> plan.decide(2, rows=0).uses.repeat.tolist(), plan.need(2)
      ([[1, 1]], Need(must=2, may=0))
      >>> list(plan.log)
      [True, False]
    """

    _spec: AdaptiveSpec

    def __init__(
        self,
        spec: AdaptiveSpec,
        *,
        lanes: Lanes | None = None,
        options: tuple[object, ...] = (),
    ):
        lanes = lanes or Lanes(spec.batch_size)
        lanes.check(batch_size=spec.batch_size)
        if lanes.host_batch < spec.batch_size:
            raise ValueError(
                f"an adaptive echo of batch_size={spec.batch_size} needs host batches "
                f"that serve a batch, and these have {lanes.host_batch} examples; use "
                "larger ones, or a smaller batch_size"
            )
        batch = spec.batch_size // lanes.count
        waiting = batch - math.gcd(batch, lanes.rows)
        if spec.min_uses > 1 and waiting:
            waiting = lanes.rows  # Some of them may lack uses that fill no batch.
        least = (waiting + lanes.rows) * lanes.count
        if spec.buffer < least:
            raise ValueError(
                f"buffer={spec.buffer} is too small to use every fresh item before it "
                f"gives way; use at least {least}"
            )
        self._replay = spec.replay or DecisionLog()
        if spec.min_uses > 1:  # Plans of earlier versions have none.
            options = ("min_uses", spec.min_uses, *options)
        sizes = (spec.buffer, spec.batch_size, lanes.host_batch, lanes.count)
        super().__init__(
            spec,
            lanes,
            num_slots=spec.buffer // lanes.count,
            rows=lanes.rows,
            fingerprint=fingerprint(
                _SEQUENCE_VERSION, *sizes, spec.max_uses, spec.seed, *options
            ),
        )

    def _start(self) -> None:
        super()._start()
        spec, rows = self._spec, self._lanes.rows
        self._items = [
            LeastRecentlyUsed(spec, self.num_slots, rows, sequence(spec.seed, lane))
            for lane in self._lanes.own
        ]
        self._recorder = Recorder()

    @property
    def log(self) -> DecisionLog:
        return self._recorder.log

    def need(self, uses: int) -> Need:
        rows = self._lanes.rows
        if self._left is not None:
            rows = min(rows, self._left)
        if not rows:
            return Need()
        # If the batch needs items and the log takes none, the upstream had ended there.
        # A restored echo has not found that out yet.
        if min([items.num_drawable for items in self._items]) < self.batch:
            return Need(must=rows)
        position = len(self._recorder)
        if position < len(self._replay):
            if self._replay[position] and not self._is_open():
                raise ValueError(
                    f"the log takes fresh items before batch {position}, which is too "
                    f"early with min_uses={self._spec.min_uses}; use one that was "
                    "recorded with this echo"
                )
            return Need(must=rows) if self._replay[position] else Need()
        return Need(may=rows) if self._is_open() else Need()

    def _is_open(self) -> bool:
        """Returns whether fresh items may come: the others had their `min_uses`."""
        # All lanes take and use fresh items alike.
        used = self._items[0].unused
        return (
            self._written - used < self.batch
            and self._used >= self._spec.min_uses * used * len(self._items)
            and not any(items.due().size for items in self._items)
        )

    def decide(self, uses: int, rows: int) -> Decision | None:
        position = len(self._recorder)
        if position < len(self._replay) and self._replay[position] != bool(rows):
            if rows:
                raise ValueError(
                    f"the log takes nothing before batch {position}, which cannot be "
                    "made without; use one that was recorded with this echo, or a "
                    "larger buffer"
                )
            raise ValueError(
                f"the log takes fresh items before batch {position}, but the upstream "
                "has ended; replay it with the same data"
            )
        slots = self._take(rows)
        size = min([self.batch, *(items.num_drawable for items in self._items)])
        if not size:
            return None
        return Decision.at_once(self._draw(size, bool(rows)), self._written, slots)

    def _take(self, rows: int) -> np.ndarray:
        for items in self._items:
            items.write(rows)
        return super()._take(rows)

    def _draw(self, size: int, taken: bool) -> Uses:
        number = len(self._recorder)
        drawn = [items.draw(size, number) for items in self._items]
        slots, repeat = (
            part[0][None] if len(part) == 1 else np.stack(part)
            for part in zip(*drawn, strict=True)
        )
        self._used += repeat.size
        self._repeats += int(np.count_nonzero(repeat))
        self._latest = repeat
        self._recorder.append(taken)
        newest = self._written - 1
        items = newest - (newest - slots.astype(np.int64)) % self.num_slots
        return Uses(slots, self._lanes.global_index(items), repeat)

    def get_state(self) -> dict[str, Any]:
        return {
            "fresh": self._written,
            "log": self._recorder.to_json(),
            "pending": self._pending,
            "plan": self._fingerprint,
        }

    def check_state(self, state: Any) -> None:
        self._check(state, _STATE_KEYS, "an adaptive echo")
        log = DecisionLog.from_json(state["log"])
        shorter = min(len(log), len(self._replay))
        if log[:shorter] != self._replay[:shorter]:
            raise ValueError(
                "this state is not on the way of the log that is replayed; restore it "
                "without a replay, or with the one it was saved with"
            )
        rows = self._lanes.rows
        most = log.count(True) * rows
        fits = max(0, most - rows + 1) <= state["fresh"] <= most
        if not fits or not 0 <= state["pending"] < (self.batch if log else 1):
            raise ValueError(
                f"this state says fresh={state['fresh']} and pending="
                f"{state['pending']}, but its log takes {most} items; it is damaged"
            )
        if log and not log[0]:
            raise ValueError(_TOO_FEW)

    def set_state(self, state: Mapping[str, Any]) -> Restored:
        # The batches of the log are decided again. For a million batches of 1024 that
        # takes about a minute on one lane, and three to four minutes on eight.
        before = dict(vars(self))
        try:
            log = DecisionLog.from_json(state["log"])
            latest = self._decide_again(log, state["fresh"])
            if state["pending"] and state["pending"] >= latest.size:
                raise ValueError(
                    f"this state says pending={state['pending']}, but its last batch "
                    f"has {latest.size} uses; it is damaged"
                )
        except ValueError:
            vars(self).update(before)
            raise
        return self._restored(latest, state["pending"])

    def _decide_again(self, log: DecisionLog, fresh: int) -> Uses:
        """Makes the batches of a log again from the start; returns the last one."""
        self._start()
        batch = Uses.none()
        for taken in log:
            if taken:
                self._take(min(self._lanes.rows, fresh - self._written))
            drawable = min([items.num_drawable for items in self._items])
            if not drawable:
                raise ValueError(_TOO_FEW)
            batch = self._draw(min(self.batch, drawable), taken)
        return batch
