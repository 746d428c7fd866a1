"""The echo that a training config describes."""

from pathlib import PurePosixPath

from echo_jax.config import Config
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.load_schedule import LoadSchedule
from echo_jax.echo.shard import WHOLE, Part
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, EchoSpec, StochasticSpec
from echo_jax.folders import run_folder

__all__ = ["largest_factor", "log_name", "make_echo_spec"]


def largest_factor(config: Config) -> float:
    """Returns the factor of a config, or the most that ``"auto"`` may become."""
    return config.echo.cap if config.echo.factor == "auto" else config.echo.factor


def make_echo_spec(
    config: Config, *, factor: float | None = None, part: Part = WHOLE
) -> AnySpec:
    """Returns the echo that a training config describes, over all parts of the data.

    Args:
      config: A checked training config.
      factor: Takes the place of the config's, which may be ``"auto"``: by default the
        largest that it may become.
      part: Whose decisions are repeated, where some are.

    Raises:
      OSError: The log to be replayed cannot be read.
      ValueError: It is not there, or is none.
    """
    echo = config.echo
    # One use of a batch is a training batch; it takes many uses of examples.
    batch_size = 1 if echo.after == "batch" else config.batch_size
    if echo.mode == "adaptive":
        replay = _read_log(echo.replay, part) if echo.replay else None
        return AdaptiveSpec(echo.cap, echo.buffer, batch_size, echo.seed, replay)
    if echo.mode == "stochastic":
        load = LoadSchedule(**echo.load.to_dict())
        return StochasticSpec(load, echo.buffer, batch_size, echo.seed)
    if factor is None:
        factor = largest_factor(config)
    return EchoSpec(factor, echo.buffer, echo.order, batch_size, echo.seed)


def log_name(part: int) -> str:
    """Returns the name of the file of a part's decisions."""
    return f"tape-{part}.json" if part else "tape.json"


def _read_log(path: str, part: Part) -> DecisionLog:
    """Reads a part's decisions, from beside those of the first."""
    own = path
    if part.number:
        own = str(PurePosixPath(path).with_name(log_name(part.number)))
        own = own.replace("gs:/", "gs://", 1) if path.startswith("gs://") else own
    try:
        with run_folder(own).open("rb") as file:
            return DecisionLog.read(file, name=own)
    except FileNotFoundError:
        raise ValueError(
            f"there is no log of decisions {own!r}; give the tape.json of an adaptive "
            "run to --config.echo.replay"
        ) from None
