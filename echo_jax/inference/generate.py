"""Continues texts token by token."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax.training.processes.distributed import call_with_host_arrays
from echo_jax.workloads.base import Variables
from echo_jax.workloads.lm import LanguageModel

__all__ = ["Generator"]


# Each token is computed from the last T tokens without a cache. So a text may grow
# beyond T, and one program serves all lengths. Tokens from `vocab` on are never drawn.
class Generator:
    """Continues sequences of tokens."""

    def __init__(
        self, task: LanguageModel, variables: Variables, vocab: int, eod: int | None
    ):
        self._length = task.model.max_len
        self._eod = eod
        self._next = functools.partial(_next_jitted, task, vocab, variables)

    # Temperature 0 takes the likeliest token. The draws for a prompt depend on `seed`
    # and on the prompt's index.
    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        temperature: float,
        seed: int,
    ) -> list[list[int]]:
        """Returns the continuation of each prompt, up to the end of the document."""
        if num_tokens < 1:
            raise ValueError(f"tokens={num_tokens} must be at least 1")
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature={temperature} must be at least 0")
        start = [] if self._eod is None else [self._eod]
        rows = [[*start, *prompt] for prompt in prompts]
        if not all(rows):
            raise ValueError(
                "an empty text cannot be continued by a model that knows no beginning "
                "of a document; begin it with a word"
            )
        begun = [len(row) for row in rows]
        is_open = [True] * len(rows)
        for number in range(num_tokens):
            if not any(is_open):
                break
            windows = [row[-self._length :] for row in rows]
            tokens = np.zeros((len(rows), self._length), np.int32)
            for row, window in zip(tokens, windows, strict=True):
                row[: len(window)] = window
            lengths = np.array([len(window) for window in windows], np.int32)
            drawn = call_with_host_arrays(
                self._draw, tokens, lengths, seed, number, float(temperature)
            )
            for index, token in enumerate(jax.device_get(drawn).tolist()):
                is_open[index] &= token != self._eod
                if is_open[index]:
                    rows[index].append(token)
        return [row[at:] for row, at in zip(rows, begun, strict=True)]

    def _draw(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        seed: int,
        number: int,
        temperature: float,
    ) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), number)
        return self._next(tokens, lengths, key, temperature)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _next_jitted(
    task: LanguageModel,
    vocab: int,
    variables: Variables,
    tokens: jax.Array,
    lengths: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
) -> jax.Array:
    """Draws the token that follows each row, int32[B]."""
    logits = task.predict(variables, {"tokens": tokens})["logits"]
    last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)[:, 0]
    last = jnp.where(jnp.arange(last.shape[1])[None] < vocab, last, -jnp.inf)
    # At temperature 0 the draw is not used.
    drawn = jax.random.categorical(key, last / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, last.argmax(axis=-1))
