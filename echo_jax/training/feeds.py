"""Which echo and which feed a config asks for."""

from collections.abc import Callable, Sequence

from jax.sharding import Mesh

from echo_jax.config import Config
from echo_jax.echo.shard import WHOLE, Part
from echo_jax.training.device import (
    DeviceEchoFeed,
    check_lanes_fit,
    count_lanes,
    make_device_plan,
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
      OSError: A log of decisions cannot be read.
      ValueError: The echo is impossible.
    """
    spec = make_echo_spec(config)
    if config.echo.where == "host":
        workload.train_dataset(spec)
    elif not config.echo.buffer_bytes:
        make_device_plan(
            spec,
            chunk_items=config.batch_size,
            num_lanes=count_lanes(config, mesh),
            max_batches=group_size(config),
        )


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
    specs = [make_echo_spec(config, factor=factor, part=part) for part in parts]
    if config.echo.where == "device":
        # Items that were augmented before the echo are not augmented again after it.
        is_decoded = config.echo.after == "decode"
        num_parts = parts[0].of
        if num_lanes:
            check_lanes_fit(num_lanes, mesh, num_parts)
        feed = DeviceEchoFeed(
            JoinedBatches([workload.fresh_dataset(part) for part in parts]),
            config,
            specs[0],
            mesh=mesh,
            num_lanes=num_lanes or count_lanes(config, mesh, num_parts=num_parts),
            parts=parts,
            sample=sample,
            augment=workload.augment_on_device if is_decoded else None,
            max_batches=group_size(config),
            note=note,
        )
    else:
        batches = JoinedBatches(
            [
                workload.train_dataset(spec, part)
                for spec, part in zip(specs, parts, strict=True)
            ]
        )
        feed = HostFeed(batches, mesh, sample=sample, parts=parts)
    return HeldFeed(feed) if config.data.hold_batch else feed
