"""What a config and a workload make together, before the first update."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from echo_jax.config import Config
from echo_jax.echo.spec import EchoSpec
from echo_jax.training.feed import Draw, Feed, HostDraw, HostInput, Input
from echo_jax.training.optim import OptimSettings
from echo_jax.training.processes import everywhere
from echo_jax.training.sharding import make_mesh, replicated
from echo_jax.training.state import TrainState
from echo_jax.training.step import Program, StepReport, make_program
from echo_jax.workloads.base import Batch, Workload

__all__ = ["Setup", "data_ended", "make_echo_spec", "make_setup", "next_batch"]

# Independent randomness, both from the run's one seed.
_INIT_KEY, _STEP_KEY = 0, 1


@dataclass(frozen=True)
class Setup:
    """The compiled functions of a run, with the arguments that never change.

    Attributes:
      program: The functions.
      mesh: The devices.
      init_key: Randomness of the parameters.
      step_key: Randomness of all updates; each folds in its own number.
      log_every: ``int32[]``, on the devices.
    """

    program: Program
    mesh: Mesh
    init_key: jax.Array
    step_key: jax.Array
    log_every: jax.Array

    def update(
        self, state: TrainState, feed: Feed, inputs: Input, *, scan: bool = False
    ) -> tuple[TrainState, StepReport]:
        """Starts updates on an input.

        Args:
          state: Donated.
          feed: Made the input; its arrays are donated, and replaced.
          inputs: From `Feed.take` or `Feed.hold`.
          scan: See `Program.updates`.

        Returns:
          The new state, and what may be read of the last update: not computed yet.
        """
        state, feed.arrays, report = self._run(
            feed.draw, state, feed.arrays, inputs, scan=scan
        )
        return state, report

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        """Starts an update on a host batch.

        Args:
          state: Donated.
          batch: With the echo's tags.

        Returns:
          See `update`.
        """
        inputs = HostInput.of([batch])
        state, _, report = self._run(HostDraw(self.mesh), state, (), inputs, scan=False)
        return state, report

    def trace(self, state: TrainState, feed: Feed) -> Any:
        """Returns what jax makes of one update before it compiles it.

        Args:
          state: Not changed.
          feed: From which nothing is taken; what its arrays hold is lost.
        """
        inputs = feed.draw.send(feed.hold(1))
        return self.program.updates(feed.draw).trace(
            state, feed.arrays, inputs, self.step_key, self.log_every
        )

    def _run(
        self, draw: Draw, state: TrainState, arrays: Any, inputs: Any, *, scan: bool
    ) -> tuple[TrainState, Any, StepReport]:
        run = self.program.updates(draw, scan)
        return run(state, arrays, draw.send(inputs), self.step_key, self.log_every)


def make_setup(config: Config, workload: Workload) -> Setup:
    """Lays out the devices and prepares the functions of a run.

    Args:
      config: A checked training config.
      workload: Made from this config.

    Returns:
      The setup; setups of equal tasks, optimizers and meshes share compilations.

    Raises:
      ValueError: The mesh does not fit the devices or the batch.
    """
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.batch_size)
    whole = replicated(mesh)

    def key_of(stream: int) -> jax.Array:
        return jax.random.fold_in(jax.random.key(config.seed), stream)

    return Setup(
        program=make_program(workload.task, OptimSettings.from_config(config), mesh),
        mesh=mesh,
        init_key=everywhere(lambda: key_of(_INIT_KEY), whole),
        step_key=everywhere(lambda: key_of(_STEP_KEY), whole),
        log_every=everywhere(lambda: jnp.int32(config.log_every), whole),
    )


def make_echo_spec(config: Config, *, factor: float | None = None) -> EchoSpec:
    """Returns the echo that a training config describes.

    Args:
      config: A checked training config.
      factor: Takes the place of the config's, which may be ``"auto"``.
    """
    return EchoSpec(
        factor=config.echo.factor if factor is None else factor,
        order=config.echo.order,
        buffer=config.echo.buffer,
        # One use of a batch is a training batch; it takes many uses of examples.
        batch_size=1 if config.echo.after == "batch" else config.batch_size,
        seed=config.echo.seed,
    )


def next_batch(iterator: Iterator[Batch], workload: Workload, when: str) -> Batch:
    """Returns the next training batch.

    Args:
      iterator: Over the training data.
      workload: Whose data it is.
      when: Ends the sentence "the data ended ..." of the error.

    Raises:
      ValueError: There is none.
    """
    batch = next(iterator, None)
    if batch is None:
        raise data_ended(workload, when)
    return batch


def data_ended(workload: Workload, when: str) -> ValueError:
    """Returns the error of training data that ended; see `next_batch`."""
    return ValueError(
        f"the training data of workload {workload.name!r} ended {when}; "
        "it must repeat without end"
    )
