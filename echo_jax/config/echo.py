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

    def __post_init__(self):
        super().__post_init__()
        _ = self.loads

    @property
    def loads(self) -> FetchSchedule:
        """The schedule of fresh loads."""
        return FetchSchedule(**self.to_dict())


@dataclass(frozen=True)
class RunEcho(Group):
    """The echo of a training."""

    # Mode fixed: the mean uses of an item, which may be a fraction, such as 2.5. The
    # other modes do not use it. `echo-jax probe` advises a value.
    factor: float = 1.0
    # The stage that it follows. The default, batch, is the weakest echo: it repeats
    # whole batches. After decode, every use of an example is augmented again.
    stage: EchoAfter = "batch"
    # consecutive | window_shuffle | shuffle_buffer (the paper's) | spread
    order: str = "consecutive"
    # Fresh items of the echoed stage that are kept: examples, or batches after stage
    # batch. For order shuffle_buffer it counts their uses.
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
    # Adaptive: the decisions.json of a run to repeat, or fixed decisions for all
    # updates: "pattern:1000" takes fresh data before every fourth update.
    replay: str = ""
    buffer_bytes: Natural = 0  # size of a device buffer; 0: echo.buffer sets it
    lanes: Natural = 0  # parts of a device buffer; 0: one for each device
    # Stochastic: the probability p that an update loads fresh data, or e = 1/p.
    fetch: FetchSpec = field(default_factory=FetchSpec)

    def __post_init__(self):
        super().__post_init__()
        _ = self.pattern

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
            rule = f"must be {max(uses):g} or more for the items of {replay!r}"
            self.refuse("max_uses", rule, math.ceil(max(uses)))
        if self.min_uses > 1:
            self.refuse("min_uses", "has no effect with a pattern", 1)
        return pattern

    def __str__(self) -> str:
        """Returns a sentence about the items, their uses, and their buffer."""
        item = "batch" if self.stage == "batch" else "example"
        items = "batches" if self.stage == "batch" else "examples"
        if self.mode == "fixed" and self.factor == 1:
            return f"no echo: every {item} is used once"
        fetch = self.fetch
        given = self.replay.rpartition("/")[2]
        when = f"by {given}" if given else "as fresh ones are ready"
        way = {
            "fixed": f"{self.factor:g} uses of every {item}, in order {self.order}",
            "adaptive": f"{self.min_uses} to {self.max_uses} uses of {items}, {when}",
            "stochastic": f"fresh {items} by a coin ({fetch.schedule}, "
            f"{fetch.quantity} from {fetch.start:g} to {fetch.end:g}), or old ones",
        }[self.mode]
        kept = f"{self.buffer:,} {items} on the {self.buffer_on}"
        return f"echo: after {self.stage}, {way}; the buffer has {kept}"
