"""The train state and the step: what one update computes, as pure functions."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import struct

from echo_jax.training.optim import Hyperparams, Optimizer, learning_rate
from echo_jax.workloads.base import Batch, Sums, Task

__all__ = [
    "MAX_METRICS",
    "REPEAT_BUCKETS",
    "LossWindow",
    "RunInputs",
    "StepReport",
    "TrainState",
    "init_state",
    "several_updates",
    "train_step",
]

State = TypeVar("State")

REPEAT_BUCKETS = 8
"""Losses are kept apart for repeats 0 to 6; bucket 7 is repeat 7 and all later."""

MAX_METRICS = 16
"""Metrics that a task may return beside its losses. The state has room for so many, so
that its structure, and with it a checkpoint's, depends on no task."""


class LossWindow(struct.PyTreeNode):
    """Losses since the last logged update, by repeat index.

    Attributes:
      loss: Summed losses of the examples per bucket, ``float32[REPEAT_BUCKETS]``.
      count: Examples per bucket, ``int32[REPEAT_BUCKETS]``.
    """

    loss: jax.Array
    count: jax.Array

    @classmethod
    def empty(cls) -> "LossWindow":
        """Returns a window with nothing in it."""
        return cls(
            loss=jnp.zeros(REPEAT_BUCKETS, jnp.float32),
            count=jnp.zeros(REPEAT_BUCKETS, jnp.int32),
        )

    def add(self, losses: jax.Array, repeat: jax.Array) -> "LossWindow":
        """Returns the window with a batch added.

        Args:
          losses: The loss of every example, ``float32[B]``.
          repeat: The repeat index of every example, ``int32[B]``.
        """
        bucket = jnp.minimum(repeat, REPEAT_BUCKETS - 1)
        # A comparison and a sum, not a scatter: its order is the same on every
        # backend and in every run.
        mine = bucket[:, None] == jnp.arange(REPEAT_BUCKETS)[None, :]
        return LossWindow(
            loss=self.loss + jnp.where(mine, losses[:, None], 0.0).sum(axis=0),
            count=self.count + mine.sum(axis=0, dtype=jnp.int32),
        )


class TrainState(struct.PyTreeNode):
    """Everything that an update changes.

    Attributes:
      update: Updates done, ``int32[]``.
      params: The parameters.
      model_state: Flax collections other than the parameters (batch statistics).
      opt_state: The optimizer's state.
      window: Losses since the last logged update.
      metrics: Sum and count of each of the task's metrics since then, in the order of
        their names, ``float32[MAX_METRICS, 2]``.
      first_bad_update: The first update whose loss was not finite, ``int32[]``,
        counted from 1; 0 while there is none.
    """

    update: jax.Array
    params: Any
    model_state: Any
    opt_state: Any
    window: LossWindow
    metrics: jax.Array
    first_bad_update: jax.Array


class StepReport(struct.PyTreeNode):
    """What the host may read of an update; it outlives the donated state.

    Attributes:
      window: Losses since the last logged update, this one included.
      metrics: By name, sum and count of the task's metrics since then, ``float32[]``.
      learning_rate: Of this update, ``float32[]``.
      first_bad_update: See `TrainState`.
    """

    window: LossWindow
    metrics: Sums
    learning_rate: jax.Array
    first_bad_update: jax.Array


class RunInputs(NamedTuple):
    """What is the same at every update of a run, and compiled into none.

    Attributes:
      key: Randomness of all updates; each folds in its own number.
      log_every: The windows start anew after every so many updates, ``int32[]``.
      hyperparams: The optimizer's numbers.
    """

    key: jax.Array
    log_every: jax.Array
    hyperparams: Hyperparams


def init_state(key: jax.Array, *, task: Task, optimizer: Optimizer) -> TrainState:
    """Returns the state before the first update.

    Args:
      key: Randomness of the parameters.
      task: The model.
      optimizer: The optimizer.
    """
    variables = dict(task.init(key))
    params = variables.pop("params")
    return TrainState(
        update=jnp.zeros((), jnp.int32),
        params=params,
        model_state=variables,
        opt_state=optimizer.init(params),
        window=LossWindow.empty(),
        metrics=jnp.zeros((MAX_METRICS, 2), jnp.float32),
        first_bad_update=jnp.zeros((), jnp.int32),
    )


def train_step(
    state: TrainState,
    batch: Batch,
    run: RunInputs,
    *,
    task: Task,
    optimizer: Optimizer,
) -> tuple[TrainState, StepReport]:
    """Performs one update.

    Pure: everything it depends on is an argument, and its randomness is
    ``fold_in(run.key, state.update)``.

    Args:
      state: The state after ``state.update`` updates.
      batch: A training batch with ``"repeat"``, ``int32[B]``.
      run: The same at every update.
      task: Model and loss.
      optimizer: The optimizer, without its numbers.

    Returns:
      The new state, and what the host may want to read.

    Raises:
      ValueError: The task returns metrics that cannot be logged.
    """
    batch = dict(batch)
    repeat = batch.pop("repeat")
    key = jax.random.fold_in(run.key, state.update)

    def mean_loss(params: Any) -> tuple[jax.Array, tuple[jax.Array, Any, Sums]]:
        variables = {"params": params, **state.model_state}
        losses, model_state, metrics = task.loss(variables, batch, key)
        return losses.mean(), (losses, model_state, metrics)

    gradient = jax.value_and_grad(mean_loss, has_aux=True)
    (loss, (losses, model_state, metrics)), grads = gradient(state.params)

    rate = learning_rate(optimizer.schedule, run.hyperparams, state.update)
    changes, opt_state = optimizer.update(
        grads, state.opt_state, state.params, run.hyperparams, rate
    )

    is_new_window = state.update % run.log_every == 0
    window, sums = jax.tree.map(
        lambda kept: jnp.where(is_new_window, 0, kept), (state.window, state.metrics)
    )
    window, sums = window.add(losses, repeat), sums + _stacked(metrics)
    is_first_bad = (state.first_bad_update == 0) & ~jnp.isfinite(loss)
    first_bad = jnp.where(is_first_bad, state.update + 1, state.first_bad_update)
    new_state = TrainState(
        update=state.update + 1,
        params=optax.apply_updates(state.params, changes),
        model_state=model_state,
        opt_state=opt_state,
        window=window,
        metrics=sums,
        first_bad_update=first_bad,
    )
    named = {name: (sums[i, 0], sums[i, 1]) for i, name in enumerate(sorted(metrics))}
    return new_state, StepReport(window, named, rate, first_bad)


def _stacked(metrics: Sums) -> jax.Array:
    """Returns sums and counts in the order of their names; see `TrainState`."""
    if len(metrics) > MAX_METRICS:
        raise ValueError(
            f"Task.loss returned {len(metrics)} metrics, and there is room for "
            f"{MAX_METRICS}; return fewer"
        )
    if "s" in metrics:
        raise ValueError(
            "Task.loss returned a metric named 's', but train_s are the seconds of "
            "training in a row; give it another name"
        )
    rows = [jnp.stack([*map(jnp.float32, metrics[name])]) for name in sorted(metrics)]
    rows += [jnp.zeros(2)] * (MAX_METRICS - len(rows))
    return jax.lax.stop_gradient(jnp.stack(rows))


def several_updates(
    update: Callable[[State, Any], tuple[State, Any]],
    state: State,
    batches: Sequence[Any],
    *,
    scan: bool,
) -> tuple[State, Any]:
    """Performs updates one after the other; to be traced.

    Args:
      update: ``(state, batch) -> (state, report)``, a pure function.
      state: Before the first of them.
      batches: One for each, with the same shapes.
      scan: Whether to loop over one copy of `update`, instead of writing it so often.

    Returns:
      The last state, and the report of the last update.
    """
    if scan and len(batches) > 1:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        state, reports = jax.lax.scan(update, state, stacked)
        return state, jax.tree.map(lambda x: x[-1], reports)
    report = None
    for batch in batches:
        state, report = update(state, batch)
    return state, report
