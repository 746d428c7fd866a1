"""Local updates: replicas with parameters of their own, which synchronise rarely."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from echo_jax.config.group import Amount, Count, Group, Momentum, Natural
from echo_jax.echo.schedule import FetchSchedule

CHANGING = ("cosine", "linear", "multistep")
"""``local.schedule``: the probability of a meeting changes over the run."""

MEETING = ("every", "bernoulli", "fetch", *CHANGING)
"""``local.schedule``: replicas meet."""

Schedule = Literal[
    "none", "every", "bernoulli", "fetch", "cosine", "linear", "multistep"
]


@dataclass(frozen=True)
class LocalSpec(Group):
    """Replicas, one on each device, with their own parameters."""

    # When replicas synchronise: none (one model) | every (`every` updates) | bernoulli
    # (with probability p) | fetch (after updates that fetch fresh data in a stochastic
    # echo) | cosine | linear | multistep (with a probability from p to p_end)
    schedule: Schedule = "none"
    every: Count = 1  # updates between synchronisations
    p: float = 1.0  # their probability
    p_end: float = 1.0  # the last one
    start_after: Natural = 0  # initial updates that all synchronise
    # The common parameters: mean | nesterov (DiLoCo: a step from the last common ones)
    outer: Literal["mean", "nesterov"] = "mean"
    outer_lr: Amount = 0.7  # the step's learning rate
    outer_momentum: Momentum = 0.9  # the step's momentum
    # Without replicas: the delay of gradients, in updates, of simulated asynchronous
    # SGD.
    staleness: Natural = 0

    def __post_init__(self):
        super().__post_init__()
        for name in ("p", "p_end"):
            if not 0 < self[name] <= 1:
                self.refuse(name, "must be a probability, in (0, 1]", 1.0)

    def meeting_schedule(self, updates: int) -> FetchSchedule:
        """Returns the probability by which replicas synchronise in so many updates."""
        if self.schedule == "bernoulli":
            return FetchSchedule("p", "constant", self.p, self.p)
        return FetchSchedule("p", self.schedule, self.p, self.p_end, updates)  # pyright: ignore[reportArgumentType]


def broken_rules(run: Any) -> Iterator[tuple[str, str, Any]]:
    """Yields each field that breaks a rule of local updates, the rule, and a fix."""
    if run.local.schedule == "none":
        return
    if run.local.schedule == "fetch" and run.echo.mode != "stochastic":
        rule = "meets where fresh data is loaded; it needs config.echo.mode=stochastic"
        yield "local.schedule", rule, "every"
    shares = "delays gradients that devices share, and replicas share none"
    of_one = "is of one model, and the mean of replicas has seen no batch"
    kind = "is the type of gradients that devices share, and replicas share none"
    for field, usual, rule in (
        ("local.staleness", 0, shares),
        ("mesh.fsdp", 1, "needs one copy of the parameters, not replicas"),
        ("batch.boundaries", (), "is for one model, not replicas"),
        ("batch.micro", 1, "is for gradients that devices share, not replicas"),
        ("precision.loss_scale", "none", "is of one model, not replicas"),
        ("precision.reduce", "auto", kind),
    ):
        group, _, name = field.partition(".")
        if run[group][name] != usual:
            yield field, rule, usual
    if run.batch.norm == "last":
        yield "batch.norm", of_one, "recompute"
