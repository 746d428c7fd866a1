"""The echo of a training config."""

import math
import re

from echo_jax.config import Config
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.schedule import FetchSchedule
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, EchoSpec, StochasticSpec

_PATTERN = "pattern:"


def fetch_schedule(config: Config) -> FetchSchedule:
    """Returns the schedule of a stochastic echo's fresh loads."""
    return FetchSchedule(**config.echo.fetch.to_dict())


# `replay` holds decisions that an adaptive echo repeats.
def echo_spec(config: Config, *, replay: DecisionLog | None = None) -> AnySpec:
    """Returns the echo of a config, over all data shards."""
    echo = config.echo
    # A training batch is one use of a batch, or many uses of examples.
    batch_size = 1 if echo.after == "batch" else config.batch_size
    if echo.mode == "adaptive":
        shared = (echo.buffer, batch_size, echo.seed, replay)
        return AdaptiveSpec(echo.max_uses, *shared, echo.min_uses)
    if echo.mode == "stochastic":
        return StochasticSpec(
            fetch_schedule(config), echo.buffer, batch_size, echo.seed
        )
    return EchoSpec(echo.factor, echo.buffer, echo.order, batch_size, echo.seed)


# With a pattern, an adaptive echo makes the same decisions on every machine, so that it
# can be compared with other echoes at equal reads.
def pattern_of(config: Config) -> str | None:
    """Returns the pattern of an adaptive echo's decisions (``1000``), or None."""
    replay = config.echo.replay
    if not replay.startswith(_PATTERN):
        return None
    pattern, most = replay.removeprefix(_PATTERN), config.echo.max_uses
    if not re.fullmatch("1[01]*", pattern):
        raise ValueError(
            f"config.echo.replay={replay!r} must be {_PATTERN!r}, a 1 and further 0s "
            f"and 1s; set --config.echo.replay={_PATTERN}1000"
        )
    uses = [at / pattern[:at].count("1") for at in range(1, len(pattern) + 1)]
    if max(uses) > most:
        raise ValueError(
            f"config.echo.replay={replay!r} would use items {max(uses):g} times, more "
            f"than config.echo.max_uses={most}; set "
            f"--config.echo.max_uses={math.ceil(max(uses))}"
        )
    return pattern


def describe_echo(config: Config) -> str:
    """Returns a sentence about the repeated items, their uses, and their buffer."""
    echo = config.echo
    item = "batch" if echo.after == "batch" else "example"
    one = "a batch" if item == "batch" else "an example"
    items = "batches" if item == "batch" else "examples"
    where = f"{echo.buffer:,} of them on the {echo.where}"
    if echo.mode == "adaptive":
        pattern = pattern_of(config)
        is_fresh = f"at every 1 of {pattern}" if pattern else "if it is ready"
        least = "at most " if echo.min_uses == 1 else f"{echo.min_uses} to "
        return (
            f"echo: after {echo.after}, what is fresh {is_fresh}, else {one} "
            f"again, each {least}{echo.max_uses} times, from the last {where}"
        )
    if echo.mode == "stochastic":
        fetch = fetch_schedule(config)
        return (
            f"echo: after {echo.after}, a coin says before each update whether fresh "
            f"data is fetched ({fetch.schedule}, {fetch.quantity} from "
            f"{fetch.start:g} to {fetch.end:g}), else {items} of the last {where} are "
            "used again"
        )
    if echo.factor == 1:
        return f"no echo: every {item} is used once"
    times = f"{echo.factor} times"
    kept = "" if echo.order == "consecutive" else f", from {where}"
    return (
        f"echo: every {item} {times.replace('.0 ', ' ')}, after {echo.after}, in order "
        f"{echo.order}{kept}"
    )
