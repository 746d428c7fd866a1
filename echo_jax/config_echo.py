"""The echo that a training config describes."""

from echo_jax.config import Config
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.load_schedule import LoadSchedule
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, EchoSpec, StochasticSpec

__all__ = ["echo_spec", "largest_factor", "leaves_factor_open", "load_schedule"]


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
