"""Opens the feed that a config describes; shows all uses of its first examples."""

import itertools
import math
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import closing
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from echo_jax.config.run import RunSpec
from echo_jax.data.pipeline.shard import SINGLE, DataShard
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.plans import make_plan
from echo_jax.echo.plans.lanes import Lanes
from echo_jax.echo.spec import AnySpec
from echo_jax.files.folders import run_file
from echo_jax.training.arrays import make_mesh
from echo_jax.training.feeds.device_feed import DeviceEchoFeed, count_lanes
from echo_jax.training.feeds.feed import Feed, HostFeed, JoinedBatches
from echo_jax.training.feeds.growing import GrowingFeed
from echo_jax.training.feeds.loader import take_sample
from echo_jax.training.update.gradients import examples_at_once
from echo_jax.workloads.base import Batch, Workload


class Use(NamedTuple):
    """A use of an example."""

    update: int  # Counted from 1.
    repeat: int  # 0 for the first use, then 1, 2, and so on.
    example: Batch  # Its arrays by name, without the axis of the batch.


class _Update(NamedTuple):
    """The batch of an update, and keys that identify its examples while in use."""

    batch: Batch
    items: Sequence[Hashable]
    repeat: np.ndarray


def first_uses(
    config: RunSpec,
    workload: Workload,
    *,
    examples: int,
    most_updates: int,
    on_progress: Callable[[str, float], None] = lambda what, done: None,
) -> list[list[Use]]:
    """Returns the uses of the first batch's first examples, without training."""
    # Small batches are parts of the whole ones, so whole ones show the same examples.
    config = config.changed({"batch.boundaries": (), "batch.factors": ()})
    # An adaptive echo repeats by time. Nothing but reading takes time here, so it
    # repeats as much as it may.
    mode, factor = config.echo.mode, math.ceil(config.echo.factor)
    wanted = {"stochastic": math.inf, "adaptive": config.echo.max_uses}.get(
        mode, factor
    )
    found: list[list[Use]] = []
    in_use: dict[Hashable, list[Use]] = {}
    batches = _on_device if config.echo.buffer_on == "device" else _on_host
    with closing(batches(config, workload)) as updates:
        for number, update in enumerate(itertools.islice(updates, most_updates), 1):
            for row, item in enumerate(update.items):
                repeat = int(update.repeat[row])
                if repeat == 0:
                    # A new example has this key now, so the old one is not in use.
                    in_use.pop(item, None)
                    if number == 1 and len(found) < examples:
                        in_use[item] = []
                        found.append(in_use[item])
                if item in in_use:
                    example = {name: x[row] for name, x in update.batch.items()}
                    in_use[item].append(Use(number, repeat, example))
            on_progress("reading examples", number / most_updates)
            if all(len(uses) >= wanted for uses in in_use.values()):
                break
    return found


def _on_host(config: RunSpec, workload: Workload) -> Generator[_Update]:
    with closing(
        JoinedBatches([workload.train_dataset(config.echo.spec(config.batch_size))])
    ) as batches:
        for batch in batches:
            index, repeat = (np.asarray(batch[x]) for x in ("fresh_index", "repeat"))
            # An echo after the batch repeats whole batches. Then the index is the
            # batch's, and every use has the same rows.
            row = np.arange(len(index)) * (config.echo.stage == "batch")
            items = [*zip(index.tolist(), row.tolist(), strict=True)]
            yield _Update(_untagged(batch), items, repeat)


def _on_device(config: RunSpec, workload: Workload) -> Generator[_Update]:
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.batch_size)
    feed = open_feed(config, workload, mesh, sample=take_sample(workload, config))
    # Jitted, as in the program of an update.
    batching = jax.jit(feed.batching)
    lanes = np.repeat(np.arange(feed.num_lanes), config.batch_size // feed.num_lanes)
    with closing(feed):
        while (inputs := feed.take(1)) is not None:
            slots, repeat, *_ = inputs[0]
            (batch,) = jax.device_get(batching(feed.arrays, inputs))
            items = [*zip(lanes.tolist(), slots.tolist(), strict=True)]
            yield _Update(_untagged(batch), items, repeat)


def _untagged(batch: Batch) -> Batch:
    tags = "fresh_index", "repeat"
    return {name: np.asarray(x) for name, x in batch.items() if name not in tags}


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
    return f"tape-{shard}.json" if shard else "tape.json"


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


def check_echo(config: RunSpec, workload: Workload, mesh: Mesh) -> None:
    """Raises if the batch or the echo is impossible; allocates nothing."""
    spec = make_echo_spec(config)
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
    if not on_device:
        workload.train_dataset(spec)
    elif not config.echo.buffer_bytes:
        lanes = Lanes(config.batch_size, count_lanes(config, mesh))
        make_plan(spec, lanes=lanes, max_batches=config.dispatch.steps)


def open_feed(
    config: RunSpec,
    workload: Workload,
    mesh: Mesh,
    *,
    sample: Batch,
    shards: Sequence[DataShard] = (SINGLE,),
    num_lanes: int = 0,
    note: Callable[[str], None] = lambda line: None,
) -> Feed:
    """Opens the feed of a run; it reads nothing before its first input."""
    specs = [make_echo_spec(config, shard=shard) for shard in shards]
    if config.echo.buffer_on == "device":
        feed = DeviceEchoFeed(
            JoinedBatches([workload.fresh_dataset(shard) for shard in shards]),
            config,
            specs[0],
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
        batches = JoinedBatches(
            [
                workload.train_dataset(spec, shard)
                for spec, shard in zip(specs, shards, strict=True)
            ]
        )
        feed = HostFeed(batches, mesh, sample=sample, shards=shards)
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
            f"there is no log of decisions {str(own)!r}; give the tape.json of an "
            "adaptive run to --config.echo.replay"
        ) from None
