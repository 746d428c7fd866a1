"""The echo that a training config describes."""

from echo_jax.config import Config
from echo_jax.echo.spec import EchoSpec

__all__ = ["largest_factor", "make_echo_spec"]


def largest_factor(config: Config) -> float:
    """Returns the factor of a config, or the most that ``"auto"`` may become."""
    return config.echo.cap if config.echo.factor == "auto" else config.echo.factor


def make_echo_spec(config: Config, *, factor: float | None = None) -> EchoSpec:
    """Returns the echo that a training config describes.

    Args:
      config: A checked training config.
      factor: Takes the place of the config's, which may be ``"auto"``.
    """
    return EchoSpec(
        factor=config.echo.factor if factor is None else factor,
        order=config.echo.order,
        buffer=config.echo.buffer,
        # One use of a batch is a training batch; it takes many uses of examples.
        batch_size=1 if config.echo.after == "batch" else config.batch_size,
        seed=config.echo.seed,
    )
