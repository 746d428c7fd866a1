"""The echo of a training: where it is, and the fields of its modes."""

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from echo_jax.config.group import Count, Group, Natural
from echo_jax.data.pipeline.spec import EchoAfter
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.schedule import FetchSchedule
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, EchoSpec, StochasticSpec

_PATTERN = "pattern:"


@dataclass(frozen=True)
class FetchSpec(Group):
    """How often a stochastic echo loads fresh data; see `FetchSchedule`."""

    quantity: str = "p"  # p, the probability of a load | e = 1/p
    schedule: str = "constant"  # constant | linear | cosine | multistep
    start: float = 1.0  # its first value
    end: float = 1.0  # its last value
    updates: int = 1  # updates until the last value

    @property
    def loads(self) -> FetchSchedule:
        """The schedule of fresh loads; ValueError if there is none such."""
        return FetchSchedule(**self.to_dict())


@dataclass(frozen=True)
class RunEcho(Group):
    """The echo of a training."""

    factor: float = 1.0  # uses of an item; `echo-jax probe` measures R
    stage: EchoAfter = "batch"  # the stage that it follows
    # consecutive | window_shuffle | shuffle_buffer (the paper's) | spread
    order: str = "consecutive"
    # Fresh items of the echoed stage; for order shuffle_buffer, their uses.
    buffer: int = 1
    seed: int = 0  # of the order
    buffer_on: Literal["host", "device"] = "host"  # the place of the buffer
    # how a use is chosen: by a plan, by what is ready, or by a coin
    mode: Literal["fixed", "adaptive", "stochastic"] = "fixed"
    # The maximum uses of an item for an adaptive echo. It needs more than R, or it
    # repeats whole batches back to back.
    max_uses: Count = 4
    # Its minimum. Above 1 where the loader takes the step's cores: `echo-jax probe`.
    min_uses: int = 1
    # Adaptive: the tape.json of a run to repeat, or fixed decisions for all updates:
    # "pattern:1000" takes fresh data before every fourth update.
    replay: str = ""
    buffer_bytes: Natural = 0  # size of a device buffer; 0: echo.buffer sets it
    lanes: Natural = 0  # parts of a device buffer; 0: one for each device
    # Stochastic: the probability p that an update loads fresh data, or e = 1/p.
    fetch: FetchSpec = field(default_factory=FetchSpec)

    def spec(self, batch_size: int, *, replay: DecisionLog | None = None) -> AnySpec:
        """Returns the echo over all data shards; `replay`: decisions to repeat."""
        # A training batch is one use of a batch, or many uses of examples.
        size = 1 if self.stage == "batch" else batch_size
        if self.mode == "adaptive":
            shared = (self.buffer, size, self.seed, replay)
            return AdaptiveSpec(self.max_uses, *shared, self.min_uses)
        if self.mode == "stochastic":
            return StochasticSpec(self.fetch.loads, self.buffer, size, self.seed)
        return EchoSpec(self.factor, self.buffer, self.order, size, self.seed)

    # With a pattern, an adaptive echo makes the same decisions on every machine, so
    # that it can be compared with other echoes at equal reads.
    @property
    def pattern(self) -> str | None:
        """The pattern of an adaptive echo's decisions (``1000``), or None."""
        replay = self.replay
        if not replay.startswith(_PATTERN):
            return None
        pattern = replay.removeprefix(_PATTERN)
        if not re.fullmatch("1[01]*", pattern):
            rule = f"must be {_PATTERN!r}, a 1 and further 0s and 1s"
            self.refuse("replay", rule, f"{_PATTERN}1000")
        uses = [at / pattern[:at].count("1") for at in range(1, len(pattern) + 1)]
        if max(uses) > self.max_uses:
            raise ValueError(
                f"replay={replay!r} would use items {max(uses):g} times, more than "
                f"max_uses={self.max_uses}; set max_uses={math.ceil(max(uses))}"
            )
        return pattern

    def __str__(self) -> str:
        """Returns a sentence about the items, their uses, and their buffer."""
        item = "batch" if self.stage == "batch" else "example"
        one = "a batch" if item == "batch" else "an example"
        items = "batches" if item == "batch" else "examples"
        where = f"{self.buffer:,} of them on the {self.buffer_on}"
        if self.mode == "adaptive":
            is_fresh = "if it is ready"
            if pattern := self.pattern:
                is_fresh = f"at every 1 of {pattern}"
            least = "at most " if self.min_uses == 1 else f"{self.min_uses} to "
            return (
                f"echo: after {self.stage}, what is fresh {is_fresh}, else {one} "
                f"again, each {least}{self.max_uses} times, from the last {where}"
            )
        if self.mode == "stochastic":
            fetch = self.fetch
            return (
                f"echo: after {self.stage}, a coin says before each update whether "
                f"fresh data is fetched ({fetch.schedule}, {fetch.quantity} from "
                f"{fetch.start:g} to {fetch.end:g}), else {items} of the last {where} "
                "are used again"
            )
        if self.factor == 1:
            return f"no echo: every {item} is used once"
        times = f"{self.factor} times"
        kept = "" if self.order == "consecutive" else f", from {where}"
        return (
            f"echo: every {item} {times.replace('.0 ', ' ')}, after {self.stage}, in "
            f"order {self.order}{kept}"
        )
