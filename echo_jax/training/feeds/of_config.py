"""Checks the echo that a config describes, and opens its feed."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from grain import IterDataset
from jax.sharding import Mesh

from echo_jax.config.run import RunSpec
from echo_jax.data.pipeline.shard import SINGLE, DataShard
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.plans import make_plan
from echo_jax.echo.plans.lanes import Lanes
from echo_jax.echo.spec import AnySpec
from echo_jax.files.folders import run_file
from echo_jax.training.feeds.device_feed import DeviceEchoFeed, count_lanes
from echo_jax.training.feeds.feed import Feed, HostFeed, JoinedBatches
from echo_jax.training.feeds.growing import GrowingFeed
from echo_jax.training.update.gradients import examples_at_once
from echo_jax.workloads.base import Batch, Workload


class EchoedData(NamedTuple):
    """An echo and its data, of one data shard."""

    spec: AnySpec
    dataset: IterDataset  # With the echo in it, or before it if that is on the devices.

    @classmethod
    def of(
        cls, config: RunSpec, workload: Workload, shard: DataShard = SINGLE
    ) -> "EchoedData":
        spec = make_echo_spec(config, shard=shard)
        if config.echo.buffer_on == "device":
            return cls(spec, workload.fresh_dataset(shard))
        return cls(spec, workload.train_dataset(spec, shard))


def make_echo_spec(config: RunSpec, *, shard: DataShard = SINGLE) -> AnySpec:
    """Returns the echo of a config, with the decisions that a shard replays."""
    replay, log = config.echo.replay, None
    if pattern := config.echo.pattern:
        decisions = itertools.cycle(decision == "1" for decision in pattern)
        log = DecisionLog(itertools.islice(decisions, config.updates))
    elif replay:
        log = _read_log(replay, shard)
    return config.echo.spec(config.batch_size, replay=log)


def log_name(shard: int) -> str:
    """Returns the file name of a shard's decision log."""
    return f"decisions-{shard}.json" if shard else "decisions.json"


def check_data(config: RunSpec, workload: Workload) -> None:
    """Raises if a batch exceeds the data, or if a first example cannot be used."""
    known, wanted = workload.num_examples, config.batch_size
    if known is not None and wanted > known:
        fits = 2 ** (known.bit_length() - 1)
        raise ValueError(
            f"config.batch_size={wanted} is more than the {known} examples that are "
            "trained on, so that a batch would hold one several times; set "
            f"--config.batch_size={fits}, or train on more"
        )
    workload.first_items()


def check_echo(config: RunSpec, workload: Workload, mesh: Mesh) -> EchoedData:
    """Returns the data of a single shard; raises if its batch or echo is impossible."""
    parts = config.batch.parts(0)
    on_device = config.echo.buffer_on == "device"
    ways = math.lcm(mesh.size, count_lanes(config, mesh) if on_device else 1)
    if config.batch_size % (parts * ways):
        raise ValueError(
            f"config.batch.factors={config.batch.factors!r} make a first batch of "
            f"{config.batch_size / parts:g} examples, which is not a multiple of the "
            f"{ways} devices and lanes; set --config.batch_size="
            f"{math.ceil(config.batch_size / (parts * ways)) * parts * ways}"
        )
    at_once, virtual = examples_at_once(config, mesh), workload.task.virtual_batch
    if at_once % virtual:
        raise ValueError(
            f"config.model.virtual_batch={virtual} does not divide the {at_once} "
            f"examples that are computed at once, of config.batch_size="
            f"{config.batch_size}; set --config.model.virtual_batch="
            f"{math.gcd(at_once, virtual)}, or another --config.batch_size"
        )
    data = EchoedData.of(config, workload)
    if on_device and not config.echo.buffer_bytes:
        lanes = Lanes(config.batch_size, count_lanes(config, mesh))
        make_plan(data.spec, lanes=lanes, max_batches=config.dispatch.steps)
    return data


def open_feed(
    config: RunSpec,
    workload: Workload,
    mesh: Mesh,
    *,
    sample: Batch,
    data: EchoedData | None = None,
    shards: Sequence[DataShard] = (SINGLE,),
    num_lanes: int = 0,
    note: Callable[[str], None] = lambda line: None,
) -> Feed:
    """Opens the feed of a run; it reads nothing before its first input.

    `data` is the result of `check_echo`, which a single shard uses.
    """
    echoed = [
        data if data and shard == SINGLE else EchoedData.of(config, workload, shard)
        for shard in shards
    ]
    datasets = [each.dataset for each in echoed]
    if config.echo.buffer_on == "device":
        feed = DeviceEchoFeed(
            JoinedBatches(datasets),
            config,
            echoed[0].spec,
            mesh=mesh,
            num_lanes=count_lanes(config, mesh, shards[0].count, num_lanes),
            shards=shards,
            sample=sample,
            # Items augmented before the echo are not augmented again after it.
            augment=workload.augment_on_device
            if config.echo.stage == "decode"
            else None,
            max_batches=config.dispatch.steps,
            note=note,
        )
    else:
        feed = HostFeed(datasets, mesh, sample=sample, shards=shards)
    if config.batch.boundaries:
        own_lanes = feed.num_lanes * len(shards) // shards[0].count
        return GrowingFeed(feed, config.batch, groups=own_lanes or len(shards))
    return feed


def _read_log(path: str, shard: DataShard) -> DecisionLog:
    own = run_file(path)
    if shard.index:
        own = own.parent / log_name(shard.index)
    try:
        return DecisionLog.from_text(own.read_bytes())
    except ValueError as error:
        raise ValueError(f"{own}: {error}") from error
    except FileNotFoundError:
        raise ValueError(
            f"there is no log of decisions {str(own)!r}; give the decisions.json of an "
            "adaptive run to --config.echo.replay"
        ) from None
