"""Local updates: every device trains a replica of its own, and now and then they meet.

An update is the project's own step inside `jax.shard_map`, on the replica and the
examples of a device, and there are two programs of it: a quiet one, which sends
nothing, and one after whose update the replicas meet and go on from their mean. The
host chooses by a function of the seed and the update alone, the same in every process,
so that nobody has to agree on anything. `jax.lax.cond` would decide on the devices, at
twice the time of an update that sends nothing.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from echo_jax.config import Config
from echo_jax.config.echo import load_schedule
from echo_jax.config.local import meeting_schedule
from echo_jax.echo.keys import mix, sequence
from echo_jax.echo.plans.stochastic import decide_loads
from echo_jax.models.batch_norm import map_norms, merged_statistics
from echo_jax.training.processes.distributed import fetch_global
from echo_jax.training.processes.sharding import batch_sharding, replicated
from echo_jax.training.saving.model import Model
from echo_jax.training.update.gradients import (
    mean_of_parts,
    mean_over_devices,
    squared_norm,
)

__all__ = [
    "LocalRun",
    "LocalState",
    "LocalUpdates",
    "Meetings",
    "Outer",
    "model_of",
]

# Of the numbers that a seed names: apart from the streams of an echo.
_MEETINGS = 0x3E37
# Updates that are decided at once.
_BLOCK = 1024
# Beside a sum of squares that is 0.
_TINY = 1e-30


class Outer(struct.PyTreeNode):
    """What the outer optimizer keeps, the same on all devices.

    Attributes:
      anchor: The parameters after the last meeting.
      state: Of Nesterov's momentum.
    """

    anchor: Any
    state: Any


class LocalState(struct.PyTreeNode):
    """The states of all replicas.

    Attributes:
      replicas: A training state whose arrays have a leading axis of the R replicas,
        one on each device.
      outer: None where replicas go on from their mean.
      spread: How far each was from the mean where they met last: the squared
        distance of its parameters, divided by the squared norm of the mean's,
        ``float32[R]``; 0 before they meet.
    """

    replicas: Any
    outer: Outer | None
    spread: jax.Array


class LocalRun(NamedTuple):
    """What is the same at every update.

    Attributes:
      inputs: Of the step; a NamedTuple with a ``key``.
      outer: Learning rate and momentum of the outer optimizer, ``float32[2]``.
    """

    inputs: Any
    outer: jax.Array


@dataclass(frozen=True)
class LocalUpdates:
    """How replicas are kept, updated and brought together; pure functions.

    Each replica keeps its own state of the optimizer, also where replicas meet. Batch
    norm takes the statistics of a replica's own examples, and each replica keeps its
    own running ones, which training does not read: merged where replicas meet, they
    would begin anew to differ, and what differs in their means would be seen in part.
    See `model_of` for those of the model that is evaluated. What is random in a model
    is drawn for each replica. Hashable, so that equal ones share a compilation.

    Attributes:
      mesh: The devices, one for each replica.
      outer: What follows from a meeting. ``mean``: the replicas' mean (local SGD, Stich
        2019). ``nesterov``: what they moved from the anchor on average is the gradient
        of SGD with Nesterov's momentum (DiLoCo, Douillard et al. 2023, algorithm 1).

    Example:
      >>> local = LocalUpdates(jax.make_mesh((4, 1), ("data", "fsdp")), "mean")
      >>> local.init({"w": jnp.zeros(3)}).replicas["w"].shape
      (4, 3)
    """

    mesh: Mesh
    outer: str = "mean"

    @classmethod
    def from_config(cls, config: Config, mesh: Mesh) -> "LocalUpdates | None":
        """Returns those of a checked training config; None if it asks for none."""
        if config.local.schedule == "none":
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
        # No state begins with a number of these, so that any will do.
        kept = _nesterov(jnp.ones(2)).init(state.params)
        return LocalState(replicas, Outer(state.params, kept), spread)

    def shardings(self, shapes: LocalState) -> LocalState:
        """Returns how a state of these shapes lies on the devices."""
        kept, split = replicated(self.mesh), self.report_sharding
        return LocalState(
            jax.tree.map(lambda _: split, shapes.replicas),
            jax.tree.map(lambda _: kept, shapes.outer),
            cast(Any, split),
        )

    @property
    def report_sharding(self) -> NamedSharding:
        """Of reports, whose arrays have a leading axis of the replicas."""
        return batch_sharding(self.mesh)

    def run(self, inputs: Any, config: Config) -> LocalRun:
        """Returns what is the same at every update; see `LocalRun`."""
        outer = config.local.outer_lr, config.local.outer_momentum
        return LocalRun(inputs, jnp.asarray(outer, jnp.float32))

    def step(
        self,
        step: Callable[[Any, Any, Any], tuple[Any, Any]],
        state: LocalState,
        batch: Any,
        run: LocalRun,
        *,
        meets: bool,
    ) -> tuple[LocalState, Any]:
        """Performs an update of every replica on its own part of a batch.

        Args:
          step: ``(state, batch, inputs) -> (state, report)``, of one replica; the
            report has a ``replica_spread``, which is filled in here.
          state: Before it.
          batch: Of all replicas, one's examples after another's.
          run: The same at every update.
          meets: Whether the replicas then meet.

        Returns:
          The new state, and the reports of all replicas, with a leading axis.
        """
        axes = self.mesh.axis_names

        def of_replica(
            state: LocalState, batch: Any, run: LocalRun
        ) -> tuple[LocalState, Any]:
            replica = jax.tree.map(lambda x: x[0], state.replicas)
            key = jax.random.fold_in(run.inputs.key, jax.lax.axis_index(axes))
            replica, report = step(replica, batch, run.inputs._replace(key=key))
            outer, spread = state.outer, state.spread[0]
            if meets:
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
        """Returns what a replica goes on from, what is kept, and how far it was."""
        # One device has nothing to send.
        axes = self.mesh.axis_names if self.mesh.size > 1 else ()
        mean = functools.partial(mean_over_devices, axes=axes)
        params = jax.tree.map(mean, replica.params)
        model_state = map_norms(lambda stats: stats, mean, replica.model_state)
        moved = jax.tree.map(jnp.subtract, replica.params, params)
        spread = squared_norm(moved) / (squared_norm(params) + _TINY)
        if outer is not None:
            descent = jax.tree.map(jnp.subtract, outer.anchor, params)
            changes, state = _nesterov(numbers).update(descent, outer.state)
            params = optax.apply_updates(outer.anchor, changes)
            outer = Outer(params, state)
        met = replica.replace(params=params, model_state=model_state)
        return met, outer, spread

    def model(self, state: LocalState) -> Model:
        """Returns what is evaluated; see `model_of`."""
        return model_of(state.replicas, state.outer and state.outer.anchor)

    def read(self, report: Any) -> Any:
        """Returns the report of all replicas together, on the host.

        All processes have to ask for it.

        Args:
          report: From `step`, with ``window``, ``gradients``, ``metrics``,
            ``learning_rate``, ``first_bad_update`` and ``replica_spread``.
        """
        of_each = jax.tree.map(fetch_global, report)
        window, gradients, metrics = jax.tree.map(
            lambda x: x.sum(axis=0),
            (of_each.window, of_each.gradients, of_each.metrics),
        )
        bad = of_each.first_bad_update
        return of_each.replace(
            window=window,
            gradients=gradients,
            metrics=metrics,
            learning_rate=of_each.learning_rate[0],
            first_bad_update=min(bad[bad > 0].tolist(), default=0),
            replica_spread=np.sqrt(of_each.replica_spread.mean()),
        )


def model_of(replicas: Any, anchor: Any = None) -> Model:
    """Returns the model of replicas: the anchor if there is one, or else their mean.

    Its batch norms have the running statistics of all replicas' examples: the mean of
    their means, and the mean of their variances plus the variance of their means. What
    differs in these from batch to batch has averaged out of them, and what differs for
    good, such as the examples that a replica sees, is in them.

    Args:
      replicas: ``params`` and ``model_state`` of all, with a leading axis.
      anchor: See `Outer`.
    """
    mean = jax.tree.map(mean_of_parts, replicas.params)
    statistics = merged_statistics(replicas.model_state, mean_of_parts)
    return Model(mean if anchor is None else anchor, statistics)


def _nesterov(numbers: jax.Array) -> optax.GradientTransformation:
    return optax.sgd(numbers[0], numbers[1], nesterov=True)


class Meetings:
    """After which updates of a run the replicas meet.

    Post-local SGD (Lin et al. 2020) meets after each of the first ``start_after``
    updates. The last update of a run ends with a meeting, so that what is trained is
    one model.

    Args:
      config: A checked training config.

    Example:
      >>> config.local.schedule, config.local.every, config.updates = "every", 4, 10
      >>> [update for update in range(10) if Meetings(config).after(update)]
      [3, 7, 9]
    """

    def __init__(self, config: Config):
        self._config = config
        self._first, self._decided = 0, np.zeros(0, bool)

    def after(self, update: int) -> bool:
        """Returns whether they meet after an update; False without local updates.

        Args:
          update: How many were done before it.
        """
        place = update - self._first
        if not 0 <= place < len(self._decided):
            self._first, place = update, 0
            self._decided = self._decide(np.arange(update, update + _BLOCK))
        return bool(self._decided[place])

    def _decide(self, updates: np.ndarray) -> np.ndarray:
        """Returns whether they meet after some updates in a row, ``bool[N]``."""
        local = self._config.local
        if local.schedule == "none":
            return np.zeros(updates.shape, bool)
        must = (updates < local.start_after) | (updates == self._config.updates - 1)
        if local.schedule == "every":
            return must | ((updates + 1 - local.start_after) % local.every == 0)
        if local.schedule == "load":
            load, seed = load_schedule(self._config), self._config.echo.seed
            return must | decide_loads(load, seed, updates)
        random = mix(sequence(self._config.seed, _MEETINGS), updates) >> np.uint64(32)
        return must | (random < meeting_schedule(self._config).threshold(updates))
