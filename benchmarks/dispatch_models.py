"""Two training steps that P9 dispatches alone and in groups, in plain jax."""

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from echo_jax.training.compiled import several_updates

_IN_FLIGHT = 2
_OPTIMIZER = optax.adam(1e-3)


@dataclass(frozen=True)
class Model:
    """A model and its data.

    Attributes:
      about: What it is, in a few words.
      params: Its parameters.
      predict: ``(params, x) -> y``.
      batch: ``x`` and ``y``, in host memory.
    """

    about: str
    params: Any
    predict: Callable[[Any, jax.Array], jax.Array]
    batch: dict[str, np.ndarray]

    def runs(self, size: int) -> tuple[Callable[[int], None], Callable[[int], None]]:
        """Returns functions that train for a number of groups: a loop, and a scan.

        Args:
          size: Updates in a group. Every one of them gets its batch from the host.
        """

        def update(state: Any, batch: Any) -> tuple[Any, jax.Array]:
            params, moments = state
            loss, grads = jax.value_and_grad(self._loss)(params, batch)
            changes, moments = _OPTIMIZER.update(grads, moments, params)
            return (optax.apply_updates(params, changes), moments), loss

        def compiled(num: int) -> Callable[[Any], Any]:
            @functools.partial(jax.jit, donate_argnums=0)
            def step(state: Any, stacked: Any) -> Any:
                batches = [{k: x[i] for k, x in stacked.items()} for i in range(num)]
                return several_updates(update, state, batches)

            return lambda state: step(
                state, {k: np.stack([x] * num) for k, x in self.batch.items()}
            )

        def run(step: Callable[[Any], Any], dispatches: int) -> Callable[[int], None]:
            # A copy: the step takes its state away.
            params = jax.tree.map(jnp.copy, self.params)
            state = (params, _OPTIMIZER.init(params))

            def groups(times: int) -> None:
                nonlocal state
                in_flight = deque()
                for _ in range(times * dispatches):
                    state, loss = step(state)
                    in_flight.append(loss)
                    if len(in_flight) > _IN_FLIGHT:
                        in_flight.popleft().block_until_ready()
                jax.block_until_ready(state)

            return groups

        return run(compiled(1), size), run(compiled(size), 1)

    def _loss(self, params: Any, batch: Any) -> jax.Array:
        return ((self.predict(params, batch["x"]) - batch["y"]) ** 2).mean()


def _dense(widths: list[int], seed: int) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(seed), len(widths))
    return [
        {"w": jax.random.normal(key, (a, b)) / a**0.5, "b": jnp.zeros((b,))}
        for key, a, b in zip(keys, widths, widths[1:], strict=False)
    ]


def _dense_predict(params: Any, x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def _batch(*shape: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return {"x": x, "y": np.zeros((shape[0], 1), np.float32)}


MODELS: dict[str, Callable[[], Model]] = {
    "tiny": lambda: Model(
        "a dense network of 2 layers",
        _dense([16, 32, 1], 0),
        _dense_predict,
        _batch(8, 16),
    ),
    "leaves": lambda: Model(
        "a dense network of 160 arrays",
        _dense([64, *[32] * 79, 1], 1),
        _dense_predict,
        _batch(8, 64),
    ),
}
"""By name, functions that make them: jax starts with the first one."""
