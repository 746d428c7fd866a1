"""Which feed a config asks for."""

from collections.abc import Callable

from jax.sharding import Mesh

from echo_jax.config import Config
from echo_jax.training.device import DeviceEchoFeed, make_draws
from echo_jax.training.feed import Feed, HeldFeed, HostFeed
from echo_jax.training.setup import make_echo_spec
from echo_jax.training.strategy import group_size
from echo_jax.workloads.base import Batch, Workload

__all__ = ["check_echo", "open_feed"]


def check_echo(config: Config, workload: Workload, mesh: Mesh) -> None:
    """Refuses an echo that cannot be, before anything is made for it.

    Args:
      config: A checked training config.
      workload: Made from this config.
      mesh: The devices.

    Raises:
      OSError: A tape cannot be read.
      ValueError: The echo is impossible.
    """
    is_auto = config.echo.factor == "auto"
    spec = make_echo_spec(config, factor=config.echo.cap if is_auto else None)
    if config.echo.where == "host":
        workload.train_dataset(spec)
    elif not config.echo.buffer_bytes:
        make_draws(config, spec, mesh=mesh, max_draws=group_size(config))


def open_feed(
    config: Config,
    workload: Workload,
    mesh: Mesh,
    *,
    factor: float,
    sample: Batch,
    note: Callable[[str], None] = lambda line: None,
) -> Feed:
    """Makes the feed of a run; nothing is read before its first input.

    Args:
      config: A checked training config.
      workload: Made from this config.
      mesh: The devices.
      factor: The echo factor, which the config may leave open.
      sample: A batch of what is upstream of the feed.
      note: Is told what is allocated.

    Raises:
      ValueError: A buffer does not fit, or the echo is impossible.
    """
    spec = make_echo_spec(config, factor=factor)
    if config.echo.where == "device":
        # Items that were augmented before the echo are not augmented again after it.
        is_decoded = config.echo.after == "decode"
        feed = DeviceEchoFeed(
            workload.fresh_dataset(),
            config,
            spec,
            mesh=mesh,
            sample=sample,
            augment=workload.augment_on_device if is_decoded else None,
            max_draws=group_size(config),
            note=note,
        )
    else:
        feed = HostFeed(workload.train_dataset(spec), mesh, sample=sample)
    return HeldFeed(feed) if config.data.hold_batch else feed
