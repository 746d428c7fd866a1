"""Local updates: devices train replicas of their own, which synchronise at times.

An update is the project's own step inside `jax.shard_map`, on the replica and the
examples of a device. It has two programs. One sends nothing. The other synchronises
the replicas after the update, and they go on from their mean. The host chooses the
program by the seed and the update alone, so all processes choose the same one.
`jax.lax.cond` would choose on the devices, but an update that sends nothing would then
take twice as long.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from echo_jax.config.run import RunSpec
from echo_jax.echo.keys import mix, sequence
from echo_jax.echo.plans.stochastic import decide_fetches
from echo_jax.models.batch_norm import map_norms, merged_statistics
from echo_jax.training.arrays import batch_sharding, fetch_global, replicated
from echo_jax.training.saving.model import Model
from echo_jax.training.update.gradients import (
    mean_of_parts,
    mean_over_devices,
    squared_norm,
)

# A random stream of the seed, different from the streams of an echo.
_SYNC_STREAM = 0x3E37
# The parts of a report that are summed over all replicas.
_SUMMED = ("window", "gradients", "metrics")
# Added to a sum of squares that may be 0.
_TINY = 1e-30


class Outer(struct.PyTreeNode):
    """The state of the outer optimizer, the same on all devices."""

    anchor: Any  # The parameters after the last synchronisation.
    state: Any  # Nesterov's momentum.


class LocalState(struct.PyTreeNode):
    """The states of all replicas."""

    replicas: Any  # A training state with a leading axis of R replicas.
    outer: Outer | None  # None if the replicas go on from their mean.
    # The squared distance of each replica from the mean at the last synchronisation,
    # divided by the mean's squared norm, float32[R]; 0 at first.
    spread: jax.Array


@dataclass(frozen=True)
class LocalUpdates:
    """Keeps, updates and synchronises replicas, by pure functions; hashable."""

    mesh: Mesh  # The devices, one for each replica.
    # ``"mean"``: replicas go on from their mean (local SGD, Stich 2019).
    # ``"nesterov"``: their mean move from the anchor is the gradient of SGD with
    # Nesterov's momentum (DiLoCo, Douillard et al. 2023, algorithm 1).
    outer: str = "mean"

    @classmethod
    def from_config(cls, config: RunSpec, mesh: Mesh) -> "LocalUpdates | None":
        """Returns the local updates of a config; None if it has none."""
        if config.local.sync_schedule == "none":
            return None
        return cls(mesh, config.local.outer)

    def init(self, state: Any) -> LocalState:
        """Returns equal replicas of a training state, before the first update."""
        replicas = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (self.mesh.size, *x.shape)), state
        )
        spread = jnp.zeros(self.mesh.size, jnp.float32)
        if self.outer == "mean":
            return LocalState(replicas, None, spread)
        # The first state does not depend on these numbers, so any will do.
        kept = _nesterov(jnp.ones(2)).init(state.params)
        return LocalState(replicas, Outer(state.params, kept), spread)

    def shardings(self, shapes: LocalState) -> LocalState:
        """Returns the shardings of a state of these shapes."""
        kept, split = replicated(self.mesh), self.report_sharding
        return LocalState(
            jax.tree.map(lambda _: split, shapes.replicas),
            jax.tree.map(lambda _: kept, shapes.outer),
            cast(Any, split),
        )

    @property
    def report_sharding(self) -> NamedSharding:
        """The sharding of reports, whose leading axis is the replicas."""
        return batch_sharding(self.mesh)

    def step(
        self,
        step: Callable[[Any, Any, Any], tuple[Any, Any]],
        state: LocalState,
        batch: Any,
        run: Any,
        *,
        syncs: bool,
    ) -> tuple[LocalState, Any]:
        """Performs an update of every replica; returns the state and all reports."""
        # `step` updates one replica: (state, batch, run) -> (state, report). The batch
        # has the examples replica by replica. `run` has a ``key``, and the ``outer``
        # learning rate and momentum.
        axes = self.mesh.axis_names

        def of_replica(
            state: LocalState, batch: Any, run: Any
        ) -> tuple[LocalState, Any]:
            replica = jax.tree.map(lambda x: x[0], state.replicas)
            key = jax.random.fold_in(run.key, jax.lax.axis_index(axes))
            replica, report = step(replica, batch, run._replace(key=key))
            outer, spread = state.outer, state.spread[0]
            if syncs:
                replica, outer, spread = self._met(replica, outer, run.outer)
            report = report.replace(replica_spread=spread)
            replica, report, spread = jax.tree.map(
                lambda x: x[None], (replica, report, spread)
            )
            return LocalState(replica, outer, spread), report

        split, whole = PartitionSpec(axes), PartitionSpec()
        states = LocalState(split, cast(Any, whole), cast(Any, split))
        return jax.shard_map(
            of_replica,
            mesh=self.mesh,
            in_specs=(states, split, whole),
            out_specs=(states, split),
            check_vma=False,
        )(state, batch, run)

    def _met(
        self, replica: Any, outer: Outer | None, numbers: jax.Array
    ) -> tuple[Any, Outer | None, jax.Array]:
        """Returns the replica to go on from, the outer state, and the spread."""
        # A single device sends nothing.
        axes = self.mesh.axis_names if self.mesh.size > 1 else ()
        mean = functools.partial(mean_over_devices, axes=axes)
        params = jax.tree.map(mean, replica.params)
        # Replicas keep their own running statistics, which training does not read. If
        # merged here, they would lose a part of the differences of their means.
        model_state = map_norms(lambda stats: stats, mean, replica.model_state)
        moved = jax.tree.map(jnp.subtract, replica.params, params)
        spread = squared_norm(moved) / (squared_norm(params) + _TINY)
        if outer is not None:
            descent = jax.tree.map(jnp.subtract, outer.anchor, params)
            with jax.numpy_dtype_promotion("standard"):  # Of bfloat16, in optax.
                changes, state = _nesterov(numbers).update(descent, outer.state)
                params = optax.apply_updates(outer.anchor, changes)
            outer = Outer(params, state)
        met = replica.replace(params=params, model_state=model_state)
        return met, outer, spread

    def model(self, state: LocalState) -> Model:
        return model_of(state.replicas, state.outer and state.outer.anchor)

    def read(self, report: Any) -> Any:
        """Returns one report over all replicas, on the host; all processes call it."""
        of_each = jax.tree.map(fetch_global, report)
        sums = {name: getattr(of_each, name) for name in _SUMMED}
        bad = of_each.first_bad_update
        return of_each.replace(
            **jax.tree.map(lambda x: x.sum(axis=0), sums),
            learning_rate=of_each.learning_rate[0],
            first_bad_update=min(bad[bad > 0].tolist(), default=0),
            replica_spread=np.sqrt(of_each.replica_spread.mean()),
        )


def model_of(replicas: Any, anchor: Any = None) -> Model:
    """Returns the model of replicas: the anchor if there is one, else their mean."""
    # Batch norm gets the mean of the means, and the mean of the variances plus the
    # variance of the means. Differences from batch to batch have averaged out of the
    # means; lasting ones, such as the examples that a replica sees, remain.
    mean = jax.tree.map(mean_of_parts, replicas.params)
    statistics = merged_statistics(replicas.model_state, mean_of_parts)
    return Model(mean if anchor is None else anchor, statistics)


def _nesterov(numbers: jax.Array) -> optax.GradientTransformation:
    return optax.sgd(numbers[0], numbers[1], nesterov=True)


def sync_updates(config: RunSpec) -> np.ndarray:
    """Returns after which updates of a run the replicas synchronise, bool[updates]."""
    local, count = config.local, config.updates
    if local.sync_schedule == "none":
        return np.zeros(count, bool)
    updates = np.arange(count)
    # Post-local SGD (Lin et al. 2020) synchronises after each of the first updates.
    # The last update of a run always does, so that the result is one model.
    must = (updates < local.start_after) | (updates == count - 1)
    if local.sync_schedule == "every":
        return must | ((updates + 1 - local.start_after) % local.sync_every == 0)
    if local.sync_schedule == "fetch":
        fetches = decide_fetches(config.echo.fetch.loads, config.echo.seed, updates)
        return must | fetches
    random = mix(sequence(config.seed, _SYNC_STREAM), updates) >> np.uint64(32)
    return must | (random < local.sync_probability(count).threshold(updates))
