"""Simulated physics: a network learns the heat equation from a solver.

Every example is computed when it is read, as in the online training of surrogate models
(Meyer et al. 2023, arXiv 2309.16743). A square plate has one temperature, its four
edges are held at others, and the field is wanted at some later time. The solver is
implicit Euler with a sparse LU factorisation, on a grid of 32 x 32 points.

An example follows from (seed, index) alone, so any number of solver threads
(``data.threads``) or processes (``data.workers``) give the same ones.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sparse
from scipy.sparse.linalg import SuperLU, splu

from echo_jax.config.run import RunSpec
from echo_jax.config.workloads import MadeData
from echo_jax.data.pipeline.stages import Item, Stages
from echo_jax.echo.keys import seed_for_use
from echo_jax.workloads.assembly import make_workload
from echo_jax.workloads.base import Batch, ModelTask, Sums, Variables, Workload, masked

GRID = 32
"""Points of the field along each side of the plate."""

_DIFFUSIVITY, _STEP_S, _NUM_STEPS = 0.1, 0.1, 5
_COLD, _HOT = 100.0, 500.0  # kelvin
_MEAN, _SCALE = 300.0, 115.0  # of temperatures, in kelvin
_NUM_PARAMETERS = 6  # five temperatures and the time


def build(config: RunSpec) -> Workload:
    """Builds the workload; its metric is ``"loss"``, the mean squared error."""
    data: MadeData = config.data
    if data.source != "solver":
        raise ValueError(
            f"data.source={data.source!r}: workload 'heat' computes its "
            "examples. Use --config.data.source=solver."
        )
    return make_workload(
        config,
        task_of,
        {},
        stages=Stages(Simulations(data.train_examples, seed=0), solve),
        evaluated=Stages(Simulations(data.eval_examples, seed=1), solve),
        keeps_evaluated=True,
        data_metadata={
            "source": "solver: the heat equation, by implicit Euler and a sparse LU",
            "synthetic": True,
            "train_examples": data.train_examples,
        },
    )


def task_of(config: RunSpec, task_info: Mapping[str, Any]) -> "FieldRegression":
    """Returns the task of a config."""
    del task_info
    widths = (config.model.width,) * config.model.depth
    return FieldRegression(Mlp(widths, jnp.dtype(config.precision.compute)))


class Simulations:
    """Parameters of simulations: temperatures of plate and edges in kelvin, and time.

    A record is ``float32[6]``; the time is a number of steps of the solver.
    """

    def __init__(self, num_records: int, seed: int):
        if num_records < 1:
            raise ValueError(
                f"{num_records} simulations are none; set --config.data.train_examples "
                "and --config.data.eval_examples to at least 1."
            )
        self._num_records, self._seed = num_records, seed

    def __len__(self) -> int:
        return self._num_records

    def __getitem__(self, index: int) -> bytes:
        random = np.random.Generator(
            np.random.Philox(int(seed_for_use(self._seed, index, 0)))
        )
        kelvin = random.uniform(_COLD, _HOT, _NUM_PARAMETERS - 1)
        steps = random.integers(1, _NUM_STEPS, endpoint=True)
        return np.array([*kelvin, steps], np.float32).tobytes()


def solve(record: bytes) -> Item:
    """Returns the normalised parameters, ``float32[6]``, and field, ``float32[1024]``.

    Example:
      >>> plate = np.array([300, 300, 300, 300, 300, 4], np.float32)
      >>> float(abs(solve(plate.tobytes())["y"]).max()) < 1e-6
      True
    """
    plate, *edges, steps = np.frombuffer(record, np.float32).astype(np.float64)
    lu, edge_terms = _solver()
    field, terms = np.full(GRID**2, plate), np.array(edges) @ edge_terms
    for _ in range(int(steps)):
        field = lu.solve(field + terms)
    kelvin = (np.array([plate, *edges]) - _MEAN) / _SCALE
    x = np.append(kelvin, 2 * steps / _NUM_STEPS - 1)
    y = (field - _MEAN) / _SCALE
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


@functools.cache
def _solver() -> tuple[SuperLU, np.ndarray]:
    """Returns the factorised step, and what each edge adds to a field, [4, 1024]."""
    flow = _DIFFUSIVITY * _STEP_S * (GRID + 1) ** 2
    line = sparse.csr_array(np.eye(GRID, k=1) - 2 * np.eye(GRID) + np.eye(GRID, k=-1))
    eye = sparse.eye_array(GRID)
    laplacian = sparse.kron(line, eye) + sparse.kron(eye, line)
    edges = np.zeros((4, GRID, GRID))
    edges[0, 0], edges[1, -1], edges[2, :, 0], edges[3, :, -1] = flow, flow, flow, flow
    matrix = sparse.eye_array(GRID**2) - flow * laplacian
    return splu(sparse.csc_array(matrix)), edges.reshape(4, -1)


class Mlp(nn.Module):
    """Dense layers from ``float32[B, 6]`` to a field, ``float32[B, 1024]``."""

    widths: tuple[int, ...]
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        del train  # Nothing in it is random.
        for width in self.widths:
            x = nn.relu(nn.Dense(width, dtype=self.dtype)(x))
        return nn.Dense(GRID**2, dtype=self.dtype)(x).astype(jnp.float32)


@dataclass(frozen=True)
class FieldRegression(ModelTask):
    """Predicts the field of a simulation from its parameters."""

    def loss(
        self, variables: Variables, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Variables, Sums]:
        """Returns the mean squared error of each field, in normalised units."""
        del key
        return self._errors(variables, batch), {}, {}

    def evaluate(self, variables: Variables, batch: Batch) -> Sums:
        return {"loss": masked(self._errors(variables, batch), batch)}

    def derive(self, means: Mapping[str, float]) -> dict[str, float]:
        """Returns the error in kelvin (root mean square)."""
        return {"error_k": _SCALE * math.sqrt(means["loss"])}

    def predict(self, variables: Variables, batch: Batch) -> dict[str, jax.Array]:
        """Returns ``"kelvin"``, the predicted fields, ``float32[B, 32, 32]``."""
        found = _MEAN + _SCALE * self._fields(variables, batch)
        return {"kelvin": found.reshape(-1, GRID, GRID)}

    def input_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"x": jax.ShapeDtypeStruct((batch_size, _NUM_PARAMETERS), jnp.float32)}

    def _fields(self, variables: Variables, batch: Batch) -> Any:
        return self.model.apply(variables, jnp.asarray(batch["x"]))

    def _errors(self, variables: Variables, batch: Batch) -> jax.Array:
        error = self._fields(variables, batch) - jnp.asarray(batch["y"])
        return jnp.square(error).mean(axis=-1)
