"""The optimizer, its learning rate, and the rules of both."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from echo_jax.config.group import (
    Amount,
    Bounds,
    Count,
    Fraction,
    Group,
    Momentum,
    Natural,
    Positive,
)

OWN_OPTIMIZERS = ("adamw", "sgd", "lars", "lamb", "rmsprop_warmup")
"""Names that stand for optimizers with fields of their own under ``optim``."""

OWN_SCHEDULES = (
    "constant",
    "linear",
    "cosine",
    "piecewise",
    "slow_start",
    "onecycle",
    "cyclic",
    "warmup_stable_decay",
)
"""Names that stand for schedules with fields of their own under ``optim``."""

SLOW_START_ENDS = (40 / 90, 70 / 90, 85 / 90)
"""Where ``slow_start`` changes its rate, if nothing is said: parts of the run (Akiba et
al. 2017, section 3: 40, 70 and 85 of 90 epochs)."""


@dataclass(frozen=True)
class OptimSpec(Group):
    """The optimizer and its learning rate."""

    # adamw, sgd, lars, lamb, rmsprop_warmup, or an optimizer of optax, such as
    # optax.lion or optax.contrib.muon. An optimizer of optax uses only args, the
    # learning rate with its schedule, and clip_norm.
    name: str = "adamw"
    args: str = "{}"  # other arguments of an optimizer of optax, as JSON
    lr: Positive = 1e-3  # peak learning rate
    # The growth of lr with the batch size, relative to reference_batch.
    scale: Literal["none", "linear", "sqrt"] = "none"
    reference_batch: Count = 256  # the batch size for which lr is meant
    # constant | linear | cosine | piecewise | slow_start | onecycle | cyclic |
    # warmup_stable_decay, or a schedule of optax, such as optax.exponential_decay
    schedule: str = "constant"
    schedule_args: str = "{}"  # arguments of a schedule of optax, as JSON
    warmup_updates: Natural = 0  # updates in which the rate rises to its peak
    start_fraction: Fraction = 0.0  # first learning rate / peak; 0: near 0
    decay_updates: Natural = 0  # updates until the decay ends; 0: config.updates
    end_fraction: Fraction = 0.01  # last learning rate / peak
    # Updates after which the rate drops (piecewise) or changes (slow_start).
    boundaries: tuple[int, ...] = ()
    boundary_scale: Amount = 0.1  # factor on the rate at each boundary
    fractions: tuple[float, ...] = (0.5, 0.075, 0.01, 0.001)  # slow_start: rate / peak
    peak_at: float = 0.3  # onecycle: fraction of the updates before the peak
    peak_momentum: Momentum = 0.85  # onecycle: momentum, or b1, at the peak
    cycle_updates: Annotated[int, Bounds(2)] = 2000  # cyclic: length of a cycle
    cooldown_updates: Count = 100  # warmup_stable_decay: length of the decay
    momentum: Momentum = 0.9  # sgd, lars, rmsprop_warmup
    nesterov: bool = True  # sgd: whether its momentum is Nesterov's
    b1: Momentum = 0.9  # adamw, lamb: decay of the mean of gradients
    b2: Momentum = 0.95  # adamw, lamb: decay of the mean of their squares
    eps: Amount = 1e-8  # for adamw and lamb
    weight_decay: Amount = 0.0  # a part of the rate, or for sgd of the gradient
    decay_vectors: bool = False  # whether to decay biases and scales of norms
    clip_norm: Amount = 0.0  # 0: no clipping
    trust_coefficient: Positive = 0.001  # lars: factor on the ratio of norms
    trust_clip: Positive = 10.0  # lamb: maximum norm of an array in the ratio
    # rmsprop_warmup: updates until half of a step is SGD's; 10 epochs in the paper.
    transition_updates: Count = 1000

    @property
    def is_of_optax(self) -> bool:
        """Whether the optimizer or the schedule is one of optax, to be tried."""
        is_own = self.name in OWN_OPTIMIZERS and self.schedule in OWN_SCHEDULES
        return not is_own

    def broken_rules(
        self, updates: int, batch_size: int
    ) -> Iterator[tuple[str, str, Any]]:
        """Yields each field that breaks a rule, the rule, and a fix."""
        schedule, total = self.schedule, self.decay_updates or updates
        ratio = batch_size / self.reference_batch
        is_forgetful = self.scale == "sqrt" and self.name in ("adamw", "lamb")
        for field in ("b1", "b2") * is_forgetful:
            if ratio * (1 - self[field]) >= 1:
                yield (
                    f"optim.{field}",
                    f"would be below 0 in a batch {ratio:g} times as large as "
                    f"config.optim.reference_batch={self.reference_batch}, as "
                    "scale=sqrt forgets faster by as much",
                    round(1 - 0.1 / ratio, 6),
                )
        if schedule in ("piecewise", "slow_start"):
            yield from self._broken_boundaries(updates)
        has_end = schedule in ("linear", "cosine", "warmup_stable_decay")
        if has_end and self.warmup_updates >= total:
            rule = f"must be below the {total} updates after which the schedule ends"
            yield "optim.warmup_updates", rule, 0
        if schedule == "onecycle" and not 0 < self.peak_at < 1:
            yield "optim.peak_at", "must lie between 0 and 1", 0.3
        most = total - max(1, self.warmup_updates)
        if schedule == "warmup_stable_decay" and self.cooldown_updates > most:
            rule = f"must be at most the {most} updates that follow the warm-up"
            yield "optim.cooldown_updates", rule, max(1, most // 10)

    def _broken_boundaries(self, updates: int) -> Iterator[tuple[str, str, Any]]:
        boundaries, fractions = self.boundaries, self.fractions
        starts = (self.warmup_updates, *boundaries)
        are_updates = all(type(each) is int and each < 2**31 for each in boundaries)
        is_rising = are_updates and all(a < b for a, b in itertools.pairwise(starts))
        is_open = self.schedule == "slow_start" and not boundaries
        if not is_open and not (boundaries and is_rising):
            first = self.warmup_updates
            rule = f"must be rising numbers of updates above the {first} of the warm-up"
            yield "optim.boundaries", rule, f"({first + updates // 2},)"
        count = len(boundaries) or len(SLOW_START_ENDS)
        are_parts = all(
            isinstance(each, int | float) and 0 < each <= 1 for each in fractions
        )
        is_right = len(fractions) == count + 1 and are_parts
        if self.schedule == "slow_start" and not is_right:
            rule = f"must be {count + 1} numbers above 0 and at most 1, for {count}"
            fix = tuple(round(0.5 * 0.1**k, 6) for k in range(count + 1))
            yield "optim.fractions", f"{rule} changes", fix
