"""Text that is tokenised when it is read: does a language model wait for it?"""

import itertools
import lzma
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sentencepiece

import echo_jax as ej
from benchmarks.harness import Result
from echo_jax.models.transformer import Transformer

_VOCAB, _SECONDS = 2048, 4.0
# Layers, width, sequences of a batch, tokens of a sequence.
_SETTINGS = [(1, 16, 32, 32), (1, 16, 256, 32), (1, 32, 32, 128), (2, 64, 32, 128)]


def language(*, small: bool = False) -> Iterator[Result]:
    """R of Transformers that learn WikiText-2, tokenised by SentencePiece."""
    if "ECHO_JAX_DATA" not in os.environ:
        raise SystemExit("language reads text: set ECHO_JAX_DATA to have wikitext2")
    path = Path(os.environ["ECHO_JAX_DATA"]) / "wikitext2" / "train.txt.xz"
    lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    with TemporaryDirectory() as folder:
        name = f"{folder}/tokens"
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(lines[:5000]),
            model_prefix=name,
            vocab_size=_VOCAB,
            minloglevel=2,
        )
        encoder = sentencepiece.SentencePieceProcessor(model_file=f"{name}.model")
    for layers, width, rows, length in _SETTINGS[: 1 if small else None]:
        step, state = _step(layers, width, length)
        report = ej.probe(
            _batches(lines, encoder, rows, length),
            step,
            state=state,
            seconds=_SECONDS / 4 if small else _SECONDS,
        )
        yield Result(
            f"language-{layers}-{width}-{rows}-{length}",
            f"R: {layers} layers of width {width}, {rows} sequences of {length} tokens",
            report.ratio,
            "<= 1",
            "",
            "none: seconds of a fresh batch / seconds of a step",
            [report.ratio_low, report.ratio_high],
            f"one thread tokenises; vocabulary {_VOCAB:,}; repeats: the 95 % interval",
        )


def _batches(
    lines: list[str], encoder: Any, rows: int, length: int
) -> Iterator[np.ndarray]:
    """Yields ``int32[rows, length + 1]``: lines in random order, end to end."""
    tokens, size = list[int](), rows * (length + 1)
    order = np.random.default_rng(0).permutation(len(lines))
    for number in itertools.cycle(order.tolist()):
        tokens += encoder.encode(lines[number])
        while len(tokens) >= size:
            yield np.array(tokens[:size], np.int32).reshape(rows, -1)
            del tokens[:size]


def _step(layers: int, width: int, length: int) -> tuple[Any, Any]:
    """Returns a jitted step of Adam, and its first state."""
    model = Transformer(
        vocab=_VOCAB,
        d_model=width,
        num_layers=layers,
        num_heads=2,
        d_ff=4 * width,
        max_len=length,
    )
    optimizer = optax.adam(1e-3)
    tokens = jnp.zeros((1, length), jnp.int32)
    params = model.init(jax.random.key(0), tokens, train=False)

    def loss(params: Any, batch: Any) -> Any:
        logits = model.apply(params, batch[:, :-1], train=False)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return losses.mean()

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, optimizer_state = state
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state)
        return (optax.apply_updates(params, updates), optimizer_state), value

    return step, (params, optimizer.init(params))
