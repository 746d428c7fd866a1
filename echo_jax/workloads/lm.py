"""Language modelling on bytes: a decoder Transformer on source code or text."""

import functools
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from echo_jax.data.evaluation import eval_batches
from echo_jax.data.pipeline import PipelineSpec, fresh_batches, train_dataset
from echo_jax.data.stage_calls import stage_calls
from echo_jax.data.stages import Stages
from echo_jax.data.text import TextWindows, decode_window, load_corpus
from echo_jax.models.transformer import Transformer
from echo_jax.workloads.base import Batch, Task, Variables, Workload

__all__ = ["LanguageModel", "build"]

_NUM_BYTES = 256


@dataclass(frozen=True)
class LanguageModel(Task):
    """Predicts every byte of a window from the bytes before it.

    A batch holds ``"tokens"``, ``uint8[B, T + 1]``: bytes 0 to T - 1 are read,
    bytes 1 to T are predicted. Losses are in nats per byte.

    Attributes:
      model: The network; its ``max_len`` is T.

    Example:
      >>> model = Transformer(
      ...     vocab=256, d_model=8, num_layers=1, num_heads=1, d_ff=16, max_len=4
      ... )
      >>> task = LanguageModel(model)
      >>> variables = jax.jit(task.init)(jax.random.key(0))
      >>> batch = {"tokens": jnp.zeros((2, 5), jnp.uint8)}
      >>> losses, _ = jax.jit(task.loss)(variables, batch, jax.random.key(1))
      >>> [round(float(x), 3) for x in losses]  # log(256): nothing is known yet
      [5.545, 5.545]
    """

    model: Transformer

    def init(self, key: jax.Array) -> Variables:
        """Returns freshly initialised variables."""
        tokens = jnp.zeros((1, self.model.max_len), jnp.int32)
        return dict(self.model.init(key, tokens, train=False))

    def loss(
        self, variables: Variables, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Variables]:
        """Returns the mean loss of every window, ``float32[B]``, and ``{}``."""
        losses = self._token_losses(variables, batch["tokens"], key)
        return losses.mean(axis=-1), {}

    def evaluate(
        self, variables: Variables, batch: Batch
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Returns the loss as (sum over the bytes of windows with mask 1, bytes)."""
        losses = self._token_losses(variables, batch["tokens"], None)
        mask = batch["mask"]
        total = (losses.sum(axis=-1) * mask).sum()
        return {"loss": (total, mask.sum() * losses.shape[-1])}

    def _token_losses(
        self, variables: Variables, tokens: ArrayLike, dropout_key: jax.Array | None
    ) -> jax.Array:
        """Returns the loss of every predicted byte, ``float32[B, T]``."""
        tokens = jnp.asarray(tokens, jnp.int32)
        is_training = dropout_key is not None
        logits = self.model.apply(
            variables,
            tokens[:, :-1],
            train=is_training,
            rngs={"dropout": dropout_key} if is_training else None,
        )
        return optax.softmax_cross_entropy_with_integer_labels(
            cast(jax.Array, logits), tokens[:, 1:]
        )


def build(config: Any) -> Workload:
    """Builds the workload.

    Args:
      config: The shared fields, ``data.source`` as `load_corpus` takes it, and
        ``model.{seq_len, d_model, num_layers, num_heads, d_ff, dropout, dtype}``.

    Returns:
      The workload; its metric is ``"loss"``, in nats per byte.

    Raises:
      FileNotFoundError, ValueError: If the text cannot be read, or a split holds
        no window.
    """
    sizes = config.model
    if not 0 <= sizes.dropout < 1:
        raise ValueError(
            f"model.dropout={sizes.dropout} must be at least 0 and below 1; set "
            "--config.model.dropout=0.0."
        )
    corpus = load_corpus(config.data.source)
    window_bytes = sizes.seq_len + 1
    train = TextWindows(corpus.train, window_bytes)
    validation = TextWindows(corpus.validation, window_bytes)
    model = Transformer(
        vocab=_NUM_BYTES,
        d_model=sizes.d_model,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        d_ff=sizes.d_ff,
        max_len=sizes.seq_len,
        dropout=sizes.dropout,
        dtype=jnp.dtype(sizes.dtype),
    )
    pipeline = PipelineSpec.from_config(config)
    stages = Stages(train, decode_window)
    return Workload(
        name="lm",
        task=LanguageModel(model),
        metric="loss",
        mode="min",
        train_dataset=functools.partial(train_dataset, stages, pipeline),
        fresh_dataset=functools.partial(fresh_batches, stages, pipeline),
        stage_calls=functools.partial(stage_calls, stages, pipeline),
        # Decoded at the first evaluation, and kept.
        eval_batches=functools.cache(
            functools.partial(
                eval_batches,
                validation,
                decode_window,
                batch_size=config.batch_size,
                max_examples=config.data.eval_examples,
            )
        ),
        facts={
            "data": {
                **corpus.facts,
                "synthetic": False,
                "window_bytes": window_bytes,
                "train_examples": len(train),
                "validation_examples": len(validation),
            },
            "storage": pipeline.storage.facts(),
        },
    )
