"""Which feed a config asks for."""

from collections.abc import Callable, Sequence

from jax.sharding import Mesh

from echo_jax.config import Config
from echo_jax.echo.shard import WHOLE, Part
from echo_jax.training.device import (
    DeviceEchoFeed,
    check_lanes_fit,
    count_lanes,
    make_draws,
)
from echo_jax.training.dispatch import group_size
from echo_jax.training.echo_spec import make_echo_spec
from echo_jax.training.feed import Feed, HeldFeed, HostFeed
from echo_jax.training.parts import JoinedBatches
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
        lanes = count_lanes(config, mesh)
        make_draws(config, spec, num_lanes=lanes, max_draws=group_size(config))


def open_feed(
    config: Config,
    workload: Workload,
    mesh: Mesh,
    *,
    factor: float,
    sample: Batch,
    parts: Sequence[Part] = (WHOLE,),
    num_lanes: int = 0,
    note: Callable[[str], None] = lambda line: None,
) -> Feed:
    """Makes the feed of a run; nothing is read before its first input.

    Args:
      config: A checked training config.
      workload: Made from this config.
      mesh: The devices.
      factor: The echo factor, which the config may leave open.
      sample: A batch of what is upstream of the feed; this process' rows.
      parts: Of the data, that this process makes.
      num_lanes: Of an echo on the devices, of the run that it goes on; 0 for a new
        one.
      note: Is told what is allocated.

    Raises:
      ValueError: A buffer does not fit, or the echo is impossible.
    """
    spec = make_echo_spec(config, factor=factor)
    if config.echo.where == "device":
        # Items that were augmented before the echo are not augmented again after it.
        is_decoded = config.echo.after == "decode"
        num_parts = parts[0].of
        if num_lanes:
            check_lanes_fit(num_lanes, mesh, num_parts)
        feed = DeviceEchoFeed(
            JoinedBatches([workload.fresh_dataset(part) for part in parts]),
            config,
            spec,
            mesh=mesh,
            num_lanes=num_lanes or count_lanes(config, mesh, num_parts=num_parts),
            parts=parts,
            sample=sample,
            augment=workload.augment_on_device if is_decoded else None,
            max_draws=group_size(config),
            note=note,
        )
    else:
        batches = JoinedBatches([workload.train_dataset(spec, part) for part in parts])
        feed = HostFeed(batches, mesh, sample=sample)
    return HeldFeed(feed) if config.data.hold_batch else feed
