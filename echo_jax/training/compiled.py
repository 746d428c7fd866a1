"""The compiled functions of a run, shared by runs that compute the same.

An update is `training.step.train_step`, on replicas within `LocalUpdates.step`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from echo_jax.config.run import RunSpec
from echo_jax.models.batch_norm import merged_statistics, statistics_of_batch
from echo_jax.training.arrays import (
    batch_sharding,
    call_with_host_arrays,
    make_mesh,
    param_shardings,
    replicate,
    replicated,
)
from echo_jax.training.feeds.feed import Batching, Feed, HostBatching, stacked
from echo_jax.training.saving.model import Model
from echo_jax.training.step import init_state, run_inputs, train_step
from echo_jax.training.update.gradients import (
    Gradient,
    gradient_of,
    mean_of_parts,
    whole_gradient,
)
from echo_jax.training.update.local import LocalUpdates
from echo_jax.training.update.loss_scale import Precision
from echo_jax.training.update.optim import Optimizer
from echo_jax.training.window import is_finite
from echo_jax.training.xla import XlaOptions, xla_options
from echo_jax.workloads.base import Batch, Sums, Task, Variables, Workload

# Two independent random streams of the run's seed.
_INIT_KEY, _STEP_KEY = 0, 1


@dataclass(eq=False)
class _Programs:
    """The jitted functions of runs with equal fields."""

    task: Task
    optimizer: Optimizer
    precision: Precision
    gradient: Gradient
    mesh: Mesh
    xla_options: XlaOptions
    local: LocalUpdates | None
    predicts: bool

    def __post_init__(self):
        fixed = {
            "task": self.task,
            "optimizer": self.optimizer,
            "precision": self.precision,
        }
        self._step = functools.partial(train_step, **fixed, gradient=self.gradient)
        self._init_one = functools.partial(init_state, **fixed)
        mesh, local, whole = self.mesh, self.local, replicated(self.mesh)
        shapes = jax.eval_shape(lambda: self._init(jax.random.key(0)))
        if local:
            self.state_sharding = local.shardings(shapes)
            self.model = jax.jit(
                local.model, in_shardings=(self.state_sharding,), out_shardings=whole
            )
            model = whole
        else:
            self.state_sharding = jax.tree.map(lambda _: whole, shapes).replace(
                params=param_shardings(shapes.params, mesh),
                opt_state=param_shardings(shapes.opt_state, mesh),
            )
            self.model = _model
            model = _model(self.state_sharding)
        self.abstract_state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            self.state_sharding,
        )
        self.variables = jax.eval_shape(lambda: self.task.init(jax.random.key(0)))
        # On a CPU, LLVM would optimize random draws for longer than they take. On two
        # cores, a ResNet-8 starts in 1.6 s instead of 12.4 s, with the same bits.
        is_cpu = mesh.devices.flat[0].platform == "cpu"
        once = {"xla_backend_optimization_level": 1} if is_cpu else None
        self.init = jax.jit(
            self._init, out_shardings=self.state_sharding, compiler_options=once
        )

        def jitted(function: Any, *inputs: Any, out: Any = whole) -> Any:
            return jax.jit(function, in_shardings=inputs, out_shardings=out)

        batch, state = batch_sharding(mesh), self.state_sharding
        self.evaluate = jitted(self._evaluate, model, batch)
        self.statistics = jitted(self._statistics, model, batch)
        self.merge = jitted(_merged, whole)
        self.is_finite = jitted(is_finite, state)
        self.copy = jitted(
            lambda state: jax.tree.map(jnp.copy, state), state, out=state
        )
        self.program = functools.lru_cache(maxsize=32)(self._program)

    def _init(self, key: jax.Array, taken: Variables | None = None) -> Any:
        state = self._init_one(key, taken or {})
        return self.local.init(state) if self.local else state

    def _evaluate(self, model: Model, batch: Batch) -> tuple[Sums, Any]:
        task, variables = self.task, model.variables
        outputs = task.predict(variables, batch) if self.predicts else {}
        return task.evaluate(variables, batch), outputs

    def _statistics(self, model: Model, batch: Batch) -> Variables:
        key = jax.random.key(0)
        with statistics_of_batch():
            _, model_state, _ = self.task.loss(model.variables, batch, key)
        return model_state

    def _program(self, batching: Batching, syncs: bool, /) -> Any:
        step, local, whole = self._step, self.local, replicated(self.mesh)

        def program(state: Any, arrays: Any, inputs: Any, run: Any) -> tuple[Any, Any]:
            def update(state: Any, batch: Batch) -> tuple[Any, Any]:
                if local:
                    return local.step(step, state, batch, run, syncs=syncs)
                return step(state, batch, run)

            return several_updates(update, state, batching(arrays, inputs))

        state, arrays = self.state_sharding, batching.arrays_sharding
        report = local.report_sharding if local else whole
        return jax.jit(
            program,
            in_shardings=(state, arrays, batching.input_sharding, whole),
            out_shardings=(state, report),
            # The state alone is donated: an echo uses the feed's arrays again.
            donate_argnums=0,
            compiler_options=dict(self.xla_options) or None,
        )


def _model(state: Any) -> Model:
    return Model(state.params, state.model_state)


def _merged(parts: Sequence[Variables]) -> Variables:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    return merged_statistics(stacked, mean_of_parts)


# A cache by value, because jit's own cache compares functions by identity. The arms of
# a study have equal tasks, optimizers, meshes and options, and so compile once.
_share = functools.lru_cache(maxsize=8)(_Programs)


class CompiledFunctions(_Programs):
    """The functions of a run, with their constant arguments.

    Each is compiled at its first call. Runs in one process share compilations if they
    have equal tasks, optimizers, precisions, meshes and XLA options.

    Attributes:
      local: Updates and synchronises replicas; None without local updates.
      init: ``(key, taken={}) -> state``; variables in ``taken`` are not drawn.
      abstract_state, variables: Shapes of a state, and of the task's variables.
      model: ``(state) -> model``, the model to evaluate.
      evaluate: ``(model, batch) -> ({metric: (sum, count)}, predictions)``, on every
        device; the predictions are ``{}`` if the workload has no evaluator.
      statistics: ``(model, batch) -> model_state`` with the batch norm statistics of
        one batch, which must have no tags.
      merge: ``([model_state]) -> model_state`` over all the batches.
      program: ``(batching, syncs) -> jitted (state, arrays, inputs, run) -> (state,
        report)``; with `syncs`, replicas synchronise after it.
      copy: ``(state) -> state`` in new memory, which may be donated.
      is_finite: ``(state) -> bool[]``.
    """

    def __init__(self, config: RunSpec, workload: Workload):
        mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.batch_size)
        local, device = LocalUpdates.from_config(config, mesh), mesh.devices.flat[0]
        shared = _share(
            workload.task,
            Optimizer.from_config(config),
            Precision.from_config(config),
            whole_gradient if local else gradient_of(config, mesh),
            mesh,
            xla_options(config, device.platform, device.device_kind),
            local,
            workload.evaluator is not None,
        )
        vars(self).update(vars(shared))  # The functions themselves, not copies of them.

        def key_of(stream: int) -> jax.Array:
            return jax.random.fold_in(jax.random.key(config.seed), stream)

        whole = replicated(mesh)
        self.init_key = replicate(lambda: key_of(_INIT_KEY), whole)
        self.run = replicate(lambda: run_inputs(config, key_of(_STEP_KEY)), whole)

    def step(
        self, state: Any, feed: Feed, inputs: Any, *, syncs: bool = False
    ) -> tuple[Any, Any]:
        """Starts the updates of an input; returns the state and the last report."""
        program = self.program(feed.batching, syncs)
        sent = feed.batching.send(inputs)
        return call_with_host_arrays(program, state, feed.arrays, sent, self.run)

    def step_on_batch(self, state: Any, batch: Batch) -> tuple[Any, Any]:
        """Starts an update on a host batch, which must have the echo's tags."""
        batching = HostBatching(self.mesh)
        sent = batching.send(stacked([batch]))
        program = self.program(batching, False)
        return call_with_host_arrays(program, state, (), sent, self.run)

    def trace(self, state: Any, feed: Feed, *, syncs: bool = False) -> Any:
        """Returns jax's trace of one update; takes nothing from the feed."""
        inputs = feed.batching.send(feed.hold(1))
        program = self.program(feed.batching, syncs)
        return program.trace(state, feed.arrays, inputs, self.run)

    def read(self, report: Any) -> Any:
        """Returns a report over all replicas; with replicas, all processes call it."""
        return self.local.read(report) if self.local else report


# Starting a program costs tens of microseconds, or more with many arrays; several
# updates in one share the cost. To the host they are one: it cannot evaluate, save or
# log inside a group. Groups start at multiples of their size, so they do not depend on
# where a run was stopped.
def next_group(done: int, steps: int, *, total: int, stops: Sequence[int]) -> int:
    """Returns how many updates to dispatch next: `steps` of them, or 1."""
    # The host needs the state at every multiple of each stop; 0 is never.
    end = done + steps
    if steps == 1 or done % steps or end > total:
        return 1
    inside = any(every and (end - 1) // every > done // every for every in stops)
    return 1 if inside else steps


def several_updates(
    update: Callable[[Any, Any], tuple[Any, Any]], state: Any, batches: Sequence[Any]
) -> tuple[Any, Any]:
    """Performs one update for each batch; returns the last state and report."""
    if len(batches) == 1:
        return update(state, batches[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    state, reports = jax.lax.scan(update, state, stacked)
    return state, jax.tree.map(lambda x: x[-1], reports)
