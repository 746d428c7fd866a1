"""One update and one evaluation batch, as pure functions, and their compilation."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from echo_jax.training.feed import Draw
from echo_jax.training.inner import several_updates
from echo_jax.training.optim import OptimSettings, make_optimizer, make_schedule
from echo_jax.training.sharding import batch_sharding, param_shardings, replicated
from echo_jax.training.state import LossWindow, TrainState
from echo_jax.workloads.base import Batch, Task

__all__ = [
    "Program",
    "StepReport",
    "Updates",
    "init_state",
    "make_program",
    "train_step",
]


Sums = dict[str, tuple[jax.Array, jax.Array]]
"""The sum and the count of each metric, ``float32[]``."""


class StepReport(struct.PyTreeNode):
    """What the host may read of an update; it outlives the donated state.

    Attributes:
      window: Losses since the last logged update, this one included.
      learning_rate: Of this update, ``float32[]``.
      first_bad_update: See `TrainState`.
    """

    window: LossWindow
    learning_rate: jax.Array
    first_bad_update: jax.Array


def init_state(key: jax.Array, *, task: Task, optim: OptimSettings) -> TrainState:
    """Returns the state before the first update.

    Args:
      key: Randomness of the parameters.
      task: The model.
      optim: The optimizer's settings.
    """
    variables = dict(task.init(key))
    params = variables.pop("params")
    return TrainState(
        update=jnp.zeros((), jnp.int32),
        params=params,
        model_state=variables,
        opt_state=make_optimizer(optim).init(params),
        window=LossWindow.empty(),
        first_bad_update=jnp.zeros((), jnp.int32),
    )


def train_step(
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    log_every: jax.Array,
    *,
    task: Task,
    optim: OptimSettings,
) -> tuple[TrainState, StepReport]:
    """Performs one update.

    Pure: everything it depends on is an argument, and its randomness is
    ``fold_in(key, state.update)``.

    Args:
      state: The state after ``state.update`` updates.
      batch: A training batch with ``"repeat"``, ``int32[B]``.
      key: The run's key; the same at every update.
      log_every: ``int32[]``; the loss window starts anew after every so many
        updates.
      task: Model and loss.
      optim: The optimizer's settings.

    Returns:
      The new state, and what the host may want to read.
    """
    batch = dict(batch)
    repeat = batch.pop("repeat")
    key = jax.random.fold_in(key, state.update)

    def mean_loss(params: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        variables = {"params": params, **state.model_state}
        losses, model_state = task.loss(variables, batch, key)
        return losses.mean(), (losses, model_state)

    gradient = jax.value_and_grad(mean_loss, has_aux=True)
    (loss, (losses, model_state)), grads = gradient(state.params)
    changes, opt_state = make_optimizer(optim).update(
        grads, state.opt_state, state.params
    )
    window = jax.tree.map(
        lambda kept: jnp.where(state.update % log_every == 0, 0, kept), state.window
    )
    window = window.add(losses, repeat)
    is_first_bad = (state.first_bad_update == 0) & ~jnp.isfinite(loss)
    first_bad = jnp.where(is_first_bad, state.update + 1, state.first_bad_update)
    learning_rate = jnp.asarray(make_schedule(optim)(state.update), jnp.float32)
    new_state = TrainState(
        update=state.update + 1,
        params=optax.apply_updates(state.params, changes),
        model_state=model_state,
        opt_state=opt_state,
        window=window,
        first_bad_update=first_bad,
    )
    return new_state, StepReport(window, learning_rate, first_bad)


class Updates(Protocol):
    """Compiled updates; see `Program.updates`."""

    def __call__(
        self,
        state: TrainState,
        arrays: Any,
        inputs: Any,
        key: jax.Array,
        log_every: jax.Array,
    ) -> tuple[TrainState, Any, StepReport]:
        """Starts them."""
        ...

    def trace(self, *args: Any) -> Any:
        """Returns what jax makes of them before it compiles."""
        ...


@dataclass(frozen=True)
class Program:
    """The compiled functions of a task on a mesh.

    Attributes:
      shardings: Where each array of a `TrainState` lives.
      abstract_state: Shapes, types and shardings of a `TrainState`.
      init: ``(key) -> TrainState``.
      updates: ``(draw, scan=False)``; returns the compiled function
        ``(state, arrays, inputs, key, log_every) -> (state, arrays, report)`` that
        performs as many updates as the draw makes batches of the inputs. It donates
        state and arrays, and never the inputs, which an echo may use again. The
        report is the last update's.
      evaluate: ``(state, batch) -> ({metric: (sum, count)}, outputs)``: what
        `Task.evaluate` and `Task.predict` return, on every device.
      is_finite: ``(state) -> bool[]``, over all its floats.
      copy: ``(state) -> state`` in memory of its own, to be donated freely.
    """

    shardings: TrainState
    abstract_state: TrainState
    init: Callable[[jax.Array], TrainState]
    updates: Callable[..., Updates]
    evaluate: Callable[[TrainState, Batch], tuple[Sums, dict[str, jax.Array]]]
    is_finite: Callable[[TrainState], jax.Array]
    copy: Callable[[TrainState], TrainState]


# A cache by value, because jit's own is by the identity of a function: the arms of
# a study have equal tasks, settings and mesh, and so compile once.
@functools.lru_cache(maxsize=8)
def make_program(task: Task, optim: OptimSettings, mesh: Mesh) -> Program:
    """Returns the functions of a task, to be compiled at their first call.

    Args:
      task: Model and loss, hashable.
      optim: The optimizer's settings.
      mesh: From `make_mesh`.

    Returns:
      The same object for equal arguments.
    """
    init = functools.partial(init_state, task=task, optim=optim)
    shapes = jax.eval_shape(init, jax.random.key(0))
    whole = replicated(mesh)
    shardings = jax.tree.map(lambda _: whole, shapes).replace(
        params=param_shardings(shapes.params, mesh),
        opt_state=param_shardings(shapes.opt_state, mesh),
    )

    def evaluate(state: TrainState, batch: Batch):
        variables = {"params": state.params, **state.model_state}
        return task.evaluate(variables, batch), task.predict(variables, batch)

    return Program(
        shardings=shardings,
        abstract_state=jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            shardings,
        ),
        init=jax.jit(init, out_shardings=shardings),
        updates=functools.partial(_make_updates, task, optim, mesh),
        evaluate=jax.jit(
            evaluate,
            in_shardings=(shardings, batch_sharding(mesh)),
            out_shardings=whole,
        ),
        is_finite=jax.jit(_is_finite, in_shardings=(shardings,), out_shardings=whole),
        copy=jax.jit(
            lambda state: jax.tree.map(jnp.copy, state),
            in_shardings=(shardings,),
            out_shardings=shardings,
        ),
    )


@functools.lru_cache(maxsize=32)
def _make_updates(
    task: Task, optim: OptimSettings, mesh: Mesh, draw: Draw, scan: bool = False
) -> Updates:
    """See `Program.updates`."""

    def updates(
        state: TrainState, arrays: Any, inputs: Any, key: jax.Array, every: jax.Array
    ) -> tuple[TrainState, Any, StepReport]:
        arrays, batches = draw(arrays, inputs)

        def update(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
            return train_step(state, batch, key, every, task=task, optim=optim)

        state, report = several_updates(update, state, batches, scan=scan)
        return state, arrays, report

    shardings = make_program(task, optim, mesh).shardings
    arrays, whole = draw.arrays_sharding, replicated(mesh)
    compiled = jax.jit(
        updates,
        in_shardings=(shardings, arrays, draw.input_sharding, whole, whole),
        out_shardings=(shardings, arrays, whole),
        donate_argnums=(0, 1),
    )
    return cast(Updates, compiled)


def _is_finite(state: TrainState) -> jax.Array:
    floats = [
        x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in floats]))
