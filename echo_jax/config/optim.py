"""The optimizer, its learning rate, and the rules of both."""

import itertools
from dataclasses import dataclass
from typing import Annotated, Literal

from echo_jax.config.group import (
    Amount,
    Boundaries,
    Bounds,
    Count,
    Fraction,
    Group,
    Natural,
    Positive,
    Share,
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

Fractions = Annotated[tuple[float, ...], Bounds(0.0, most=1.0, is_above=True)]
PeakAt = Annotated[float, Bounds(0.0, below=1.0, is_above=True)]


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
    # Updates until the decay ends, with those of the warm-up; 0: all config.updates.
    decay_updates: Natural = 0
    end_fraction: Fraction = 0.01  # last learning rate / peak
    # Updates after which the rate drops (piecewise) or changes (slow_start).
    boundaries: Boundaries = ()
    boundary_scale: Amount = 0.1  # factor on the rate at each boundary
    # slow_start: rate / peak before the first boundary, and after each of them.
    fractions: Fractions = (0.5, 0.075, 0.01, 0.001)
    peak_at: PeakAt = 0.3  # onecycle: fraction of the updates before the peak
    peak_momentum: Share = 0.85  # onecycle: momentum, or b1, at the peak
    cycle_updates: Annotated[int, Bounds(2)] = 2000  # cyclic: length of a cycle
    cooldown_updates: Count = 100  # warmup_stable_decay: length of the decay
    momentum: Share = 0.9  # sgd, lars, rmsprop_warmup
    nesterov: bool = True  # sgd: whether its momentum is Nesterov's
    b1: Share = 0.9  # adamw, lamb: decay of the mean of gradients
    b2: Share = 0.95  # adamw, lamb: decay of the mean of their squares
    eps: Amount = 1e-8  # for adamw and lamb
    weight_decay: Amount = 0.0  # a part of the rate, or for sgd of the gradient
    decay_vectors: bool = False  # whether to decay biases and scales of norms
    clip_norm: Amount = 0.0  # 0: no clipping
    trust_coefficient: Positive = 0.001  # lars: factor on the ratio of norms
    trust_clip: Positive = 10.0  # lamb: maximum norm of an array in the ratio
    # rmsprop_warmup: updates until half of a step is SGD's; 10 epochs in the paper.
    transition_updates: Count = 1000

    def check(self, updates: int, batch_size: int) -> None:
        """Refuses values that are impossible in a run of this length and batch."""
        schedule, total = self.schedule, self.decay_updates or updates
        ratio = batch_size / self.reference_batch
        is_forgetful = self.scale == "sqrt" and self.name in ("adamw", "lamb")
        for field in ("b1", "b2") * is_forgetful:
            if ratio * (1 - self[field]) >= 1:
                base = f"config.optim.reference_batch={self.reference_batch}"
                rule = f"would be below 0 with scale=sqrt, {ratio:g} times {base}"
                self.refuse(field, rule, round(1 - 0.1 / ratio, 6))
        first = self.warmup_updates
        is_rising = all(a < b for a, b in itertools.pairwise((first, *self.boundaries)))
        if not is_rising or (schedule == "piecewise" and not self.boundaries):
            rule = f"must be rising numbers of updates above the {first} of the warm-up"
            self.refuse("boundaries", rule, f"({first + updates // 2},)")
        count = len(self.boundaries or SLOW_START_ENDS) + 1
        if schedule == "slow_start" and len(self.fractions) != count:
            fix = tuple(round(0.5 * 0.1**k, 6) for k in range(count))
            rule = f"must be {count} numbers for {count - 1} changes"
            self.refuse("fractions", rule, fix)
        has_end = schedule in ("linear", "cosine", "warmup_stable_decay")
        if has_end and first >= total:
            rule = f"must be below the {total} updates after which the schedule ends"
            self.refuse("warmup_updates", rule, 0)
        most = total - max(1, first)
        if schedule == "warmup_stable_decay" and self.cooldown_updates > most:
            rule = f"must be at most the {most} updates that follow the warm-up"
            self.refuse("cooldown_updates", rule, max(1, most // 10))
