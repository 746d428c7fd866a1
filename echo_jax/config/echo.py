"""The echo that a training config describes."""

import math
import re

from echo_jax.config import Config
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.load_schedule import LoadSchedule
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, EchoSpec, StochasticSpec

__all__ = [
    "describe_echo",
    "echo_spec",
    "largest_factor",
    "leaves_factor_open",
    "load_schedule",
    "pattern_of",
]

_PATTERN = "pattern:"


def leaves_factor_open(config: Config) -> bool:
    """Whether the factor of a config is ``"auto"``, to be decided by measuring."""
    return config.echo.factor == "auto"


def largest_factor(config: Config) -> float:
    """Returns the factor of a config, or the most that an open one may become."""
    return config.echo.cap if leaves_factor_open(config) else config.echo.factor


def load_schedule(config: Config) -> LoadSchedule:
    """Returns how likely updates of a stochastic echo load fresh data.

    Args:
      config: A training config.

    Raises:
      ValueError: There is no such schedule.
    """
    return LoadSchedule(**config.echo.load.to_dict())


def echo_spec(
    config: Config, *, factor: float | None = None, replay: DecisionLog | None = None
) -> AnySpec:
    """Returns the echo that a training config describes, over all data shards.

    Args:
      config: A training config.
      factor: Takes the place of the config's, which may be open: by default the
        largest that it may become.
      replay: Decisions that an adaptive echo repeats.

    Raises:
      ValueError: There is no such echo.
    """
    echo = config.echo
    # One use of a batch is a training batch; it takes many uses of examples.
    batch_size = 1 if echo.after == "batch" else config.batch_size
    if echo.mode == "adaptive":
        return AdaptiveSpec(echo.cap, echo.buffer, batch_size, echo.seed, replay)
    if echo.mode == "stochastic":
        return StochasticSpec(load_schedule(config), echo.buffer, batch_size, echo.seed)
    if factor is None:
        factor = largest_factor(config)
    return EchoSpec(factor, echo.buffer, echo.order, batch_size, echo.seed)


def pattern_of(config: Config) -> str | None:
    """Returns the decisions that an adaptive echo repeats for ever, such as ``1000``.

    So an echo that goes by what is ready does the same on every machine, and can be
    compared with others at equal reads.

    Args:
      config: A training config.

    Returns:
      None where ``echo.replay`` is the log of a run, or empty.

    Raises:
      ValueError: It is no pattern by which a batch is always ready.
    """
    replay = config.echo.replay
    if not replay.startswith(_PATTERN):
        return None
    pattern, cap = replay.removeprefix(_PATTERN), config.echo.cap
    if not re.fullmatch("1[01]*", pattern):
        raise ValueError(
            f"config.echo.replay={replay!r} must be {_PATTERN!r}, a 1 and further 0s "
            f"and 1s; set --config.echo.replay={_PATTERN}1000"
        )
    uses = [at / pattern[:at].count("1") for at in range(1, len(pattern) + 1)]
    if max(uses) > cap:
        raise ValueError(
            f"config.echo.replay={replay!r} would use items {max(uses):g} times, more "
            f"than config.echo.cap={cap}; set --config.echo.cap={math.ceil(max(uses))}"
        )
    return pattern


def describe_echo(config: Config) -> str:
    """Says in a sentence what is repeated, how often, and from where.

    Example:
      >>> describe_echo(load_config("configs/lm.py:tiny", {"echo.factor": 2.0}))
      'echo: every batch 2 times, after batch, in order consecutive'
    """
    echo = config.echo
    item = "batch" if echo.after == "batch" else "example"
    one = "a batch" if item == "batch" else "an example"
    items = "batches" if item == "batch" else "examples"
    where = f"{echo.buffer:,} of them on the {echo.where}"
    if echo.mode == "adaptive":
        pattern = pattern_of(config)
        is_fresh = f"at every 1 of {pattern}" if pattern else "if it is ready"
        return (
            f"echo: after {echo.after}, what is fresh {is_fresh}, else {one} "
            f"again, each at most {echo.cap} times, from the last {where}"
        )
    if echo.mode == "stochastic":
        load = load_schedule(config)
        return (
            f"echo: after {echo.after}, a coin says before each update whether fresh "
            f"data is loaded ({load.schedule}, {load.quantity} from {load.start:g} to "
            f"{load.end:g}), else {items} of the last {where} are used again"
        )
    if echo.factor == 1:
        return f"no echo: every {item} is used once"
    times = f"{echo.factor} times"
    if leaves_factor_open(config):
        times = f"as often as the loader needs, at most {echo.cap} times"
    kept = "" if echo.order == "consecutive" else f", from {where}"
    return (
        f"echo: every {item} {times.replace('.0 ', ' ')}, after {echo.after}, in order "
        f"{echo.order}{kept}"
    )
