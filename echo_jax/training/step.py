"""One update: the state, the report, and `train_step`, a pure function.

What else an update may do wraps the step: gradients of parts in `gradients`, a loss
scale in `loss_scale`, replicas in `local`. `training.compiled` compiles it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from echo_jax.config.run import RunSpec
from echo_jax.training.saving.weights import replaced
from echo_jax.training.update.gradients import Gradient, squared_norm, whole_gradient
from echo_jax.training.update.loss_scale import (
    LossScale,
    Precision,
    ScaleReport,
    adjust,
    scale_numbers,
)
from echo_jax.training.update.optim import Numbers, Optimizer, numbers_at, numbers_of
from echo_jax.training.window import (
    MAX_METRICS,
    GradientWindow,
    LossWindow,
    is_finite,
    metric_means,
    named_metrics,
    stacked_metrics,
)
from echo_jax.workloads.base import Batch, Sums, Task, Variables


class TrainState(struct.PyTreeNode):
    """The training state: all arrays that an update changes.

    Attributes:
      update: Updates done, ``int32[]``.
      model_state: Flax collections other than the parameters (batch statistics).
      window: Losses since the last logged update.
      metrics: Sum and count of each task metric since then, sorted by name,
        ``float32[MAX_METRICS, 2]``.
      first_bad_update: The update whose non-finite loss ends the run, ``int32[]``,
        counted from 1; 0 while there is none.
    """

    update: jax.Array
    params: Any
    model_state: Any
    opt_state: Any
    window: LossWindow
    gradients: GradientWindow
    metrics: jax.Array
    first_bad_update: jax.Array
    loss_scale: LossScale | None


class StepReport(struct.PyTreeNode):
    """The numbers of an update that the host may read; not donated with the state.

    Attributes:
      metrics: Sum and count of each task metric since the last logged update.
      replica_spread: Distance of the replicas from their mean when they last
        synchronised: a root mean square, relative to the norm of the mean.
    """

    window: LossWindow
    gradients: GradientWindow
    metrics: Sums
    learning_rate: jax.Array
    first_bad_update: jax.Array
    loss_scale: ScaleReport | None
    replica_spread: Any = None

    def row(self) -> dict[str, float]:
        """Returns the report's columns of a logged row; waits for the numbers."""
        report = jax.device_get(self)
        spread, scaler = report.replica_spread, report.loss_scale
        scale = {} if scaler is None else scaler._asdict()
        return {
            "loss": report.window.mean(),
            "learning_rate": float(report.learning_rate),
            **{name: number.item() for name, number in scale.items()},
            **report.gradients.row(),
            **({} if spread is None else {"replica_spread": float(spread)}),
            **report.window.mean_by_repeat(),
            **metric_means(report.metrics),
        }


class RunInputs(NamedTuple):
    """Arguments of the compiled step that are the same at every update of a run.

    Attributes:
      key: Random key of the run; each update folds in its own number.
      log_every: Updates in a window, ``int32[]``.
      loss_scale: From `scale_numbers`, ``float32[3]``; None without a loss scale.
      outer: Learning rate and momentum of the outer optimizer, ``float32[2]``.
    """

    key: jax.Array
    log_every: jax.Array
    numbers: Numbers
    loss_scale: Any
    outer: jax.Array


def run_inputs(config: RunSpec, key: jax.Array) -> RunInputs:
    """Returns the `RunInputs` of a config."""
    numbers = jax.tree.map(jnp.asarray, numbers_of(config))  # Compiles no conversion.
    log_every = jnp.asarray(np.int32(config.log_every))
    outer = np.array([config.local.outer_lr, config.local.outer_momentum], np.float32)
    scale = scale_numbers(config)
    return RunInputs(key, log_every, numbers, scale, jnp.asarray(outer))


def init_state(
    key: jax.Array,
    taken: Variables,
    *,
    task: Task,
    optimizer: Optimizer,
    precision: Precision,
) -> TrainState:
    """Returns the state before the first update; `taken` variables are not drawn."""
    variables = replaced(task.init(key), taken)
    params = variables.pop("params")
    params = jax.tree.map(lambda x: x.astype(precision.params), params)
    return TrainState(
        update=jnp.zeros((), jnp.int32),
        params=params,
        model_state=variables,
        opt_state=optimizer.init(params),
        window=LossWindow.empty(),
        gradients=GradientWindow.empty(),
        metrics=jnp.zeros((MAX_METRICS, 2), jnp.float32),
        first_bad_update=jnp.zeros((), jnp.int32),
        loss_scale=None if precision.loss_scale == "none" else LossScale.at_start(),
    )


# Pure: its randomness is fold_in(run.key, state.update).
def train_step(
    state: TrainState,
    batch: Batch,
    run: RunInputs,
    *,
    task: Task,
    optimizer: Optimizer,
    precision: Precision,
    gradient: Gradient = whole_gradient,
) -> tuple[TrainState, StepReport]:
    """Performs one update; returns the new state and the update's report."""
    batch = dict(batch)
    repeat = batch.pop("repeat")  # int32[B], the use index of every example.
    key = jax.random.fold_in(run.key, state.update)
    scaler = state.loss_scale
    factor: Any = None if scaler is None else scaler.factor(run.loss_scale)
    variables = {"params": state.params, **state.model_state}
    found = gradient(task, variables, batch, key, factor)

    numbers = numbers_at(run.numbers, state.update)
    changes, opt_state = optimizer.update(
        found.gradient, state.opt_state, state.params, numbers
    )

    is_new_window = state.update % run.log_every == 0
    window, gradients, sums = jax.tree.map(
        lambda kept: jnp.where(is_new_window, 0, kept),
        (state.window, state.gradients, state.metrics),
    )
    skipped = state.replace(
        update=state.update + 1, window=window, gradients=gradients, metrics=sums
    )
    with jax.numpy_dtype_promotion("standard"):  # Parameters may be bfloat16.
        params = optax.apply_updates(state.params, changes)
    new_state = skipped.replace(
        params=params,
        model_state=found.model_state,
        opt_state=opt_state,
        window=window.add(found.losses, repeat),
        gradients=gradients.add(squared_norm(found.gradient), found.noise),
        metrics=sums + stacked_metrics(found.metrics),
    )
    loss = found.losses.mean()
    if scaler is None:
        scale_report, is_bad = None, ~jnp.isfinite(loss)
    else:
        is_used = is_finite((loss, found.gradient, found.model_state))
        new_state = jax.tree.map(
            lambda new, old: jnp.where(is_used, new, old), new_state, skipped
        )
        is_dynamic = precision.loss_scale == "dynamic"
        scaler, is_bad = adjust(scaler, run.loss_scale, is_used, is_dynamic=is_dynamic)
        scale_report = ScaleReport(factor, scaler.skipped_updates)
    is_first_bad = (state.first_bad_update == 0) & is_bad
    first_bad = jnp.where(is_first_bad, state.update + 1, state.first_bad_update)
    new_state = new_state.replace(first_bad_update=first_bad, loss_scale=scaler)
    sums = named_metrics(new_state.metrics, found.metrics)
    return new_state, StepReport(
        new_state.window,
        new_state.gradients,
        sums,
        numbers["lr"],
        first_bad,
        scale_report,
    )
