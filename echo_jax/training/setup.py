"""What a config and a workload make together, before the first update."""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from echo_jax.config import Config
from echo_jax.echo.spec import EchoSpec
from echo_jax.training.optim import OptimSettings
from echo_jax.training.sharding import make_mesh, put_batch, replicated
from echo_jax.training.state import TrainState
from echo_jax.training.step import Program, StepReport, make_program
from echo_jax.workloads.base import Batch, Workload

__all__ = ["Setup", "make_echo_spec", "make_setup", "next_batch"]

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

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        """Starts an update on a host batch.

        Args:
          state: Donated.
          batch: From the training iterator, with the echo's tags.

        Returns:
          The new state and what may be read of the update, not computed yet.
        """
        # Only the host needs to know which fresh item an example is.
        arrays = {name: x for name, x in batch.items() if name != "fresh_index"}
        arrays = put_batch(arrays, self.mesh)
        return self.program.step(state, arrays, self.step_key, self.log_every)


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
    key = jax.random.key(config.seed)
    whole = replicated(mesh)
    return Setup(
        program=make_program(workload.task, OptimSettings.from_config(config), mesh),
        mesh=mesh,
        init_key=jax.random.fold_in(key, _INIT_KEY),
        step_key=jax.device_put(jax.random.fold_in(key, _STEP_KEY), whole),
        log_every=jax.device_put(jnp.int32(config.log_every), whole),
    )


def make_echo_spec(config: Config) -> EchoSpec:
    """Returns the echo that a training config describes."""
    return EchoSpec(
        factor=config.echo.factor,
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
        raise ValueError(
            f"the training data of workload {workload.name!r} ended {when}; "
            "it must repeat without end"
        )
    return batch
