"""Language modelling: a decoder Transformer on bytes, subwords or documents."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from echo_jax.config.run import RunSpec
from echo_jax.config.workloads import LmModel, TextData
from echo_jax.data.pipeline.stages import Stages
from echo_jax.data.text.sequences import open_sequences
from echo_jax.models.transformer import Transformer
from echo_jax.workloads.assembly import limited, make_workload
from echo_jax.workloads.base import Batch, ModelTask, Sums, Variables, Workload

# Of dropout; None in evaluation.
Key = jax.Array | None


@dataclass(frozen=True)
class LanguageModel(ModelTask):
    """Predicts every token of a window from the tokens before it.

    A batch holds ``"tokens"``, ``uint8`` to ``uint32[B, T + 1]``: tokens 0 to T - 1 are
    read, tokens 1 to T are predicted. ``"length"``, ``int32[B]``, is the number of
    tokens before the padding; a batch without it is not padded. Losses are in nats per
    token.
    """

    model: Transformer
    # The token that ends a document, if documents in one window must not see each
    # other; None: a window is one document.
    eod: int | None = None
    # In the validation text, to compare tokenizers; None if unknown.
    bytes_per_token: float | None = None

    # Windows with padding are weighted by their tokens, so that the mean over the batch
    # is the mean over its tokens.
    def loss(
        self, variables: Variables, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Variables, Sums]:
        """Returns each window's mean loss, float32[B], and ``tokens_per_update``."""
        losses = self._token_losses(variables, batch, key)
        if "length" not in batch:
            return losses.mean(axis=-1), {}, {"tokens_per_update": (losses.size, 1)}
        real = _is_real(batch, losses)
        tokens = real.sum()
        losses = (losses * real).sum(axis=-1) * (len(losses) / tokens)
        return losses, {}, {"tokens_per_update": (tokens, 1)}

    def evaluate(self, variables: Variables, batch: Batch) -> Sums:
        """Returns the loss as (sum over the tokens of windows with mask 1, tokens)."""
        losses = self._token_losses(variables, batch, None)
        real, mask = _is_real(batch, losses), batch["mask"]
        total = ((losses * real).sum(axis=-1) * mask).sum()
        return {"loss": (total, (real.sum(axis=-1) * mask).sum())}

    def predict(self, variables: Variables, batch: Batch) -> dict[str, jax.Array]:
        """Returns ``"logits"``, float32[B, T, V]; entry t predicts token t + 1."""
        tokens = jnp.asarray(batch["tokens"], jnp.int32)
        return {"logits": self._logits(variables, tokens, None)}

    def input_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (batch_size, self.model.max_len)
        return {"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)}

    def derive(self, means: Mapping[str, float]) -> dict[str, float]:
        """Returns ``"perplexity"``, per token, and ``"bits_per_byte"`` if known."""
        loss = means["loss"]
        # The perplexity of a model that has diverged may overflow a float.
        derived = {"perplexity": math.exp(loss) if loss < 700 else math.inf}
        if self.bytes_per_token:
            derived["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        return derived

    def _token_losses(self, variables: Variables, batch: Batch, key: Key) -> jax.Array:
        tokens = jnp.asarray(batch["tokens"], jnp.int32)
        logits = self._logits(variables, tokens[:, :-1], key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])

    def _logits(self, variables: Variables, tokens: jax.Array, key: Key) -> jax.Array:
        """Returns the logits of every next token, float32[B, T, V]."""
        ends = None if self.eod is None else tokens == self.eod
        logits: Any = self.model.apply(
            variables,
            tokens,
            train=key is not None,
            segments=None if ends is None else ends.cumsum(axis=1),
            rngs=None if key is None else {"dropout": key},
        )
        return logits


def _is_real(batch: Batch, losses: jax.Array) -> jax.Array:
    """Returns 1 for every predicted token before the padding, float32[B, T]."""
    if "length" not in batch:
        return jnp.ones_like(losses)
    # The first token of a window is not predicted.
    predicted = jnp.asarray(batch["length"])[:, None] - 1
    return (jnp.arange(losses.shape[1])[None] < predicted).astype(losses.dtype)


def build(config: RunSpec) -> Workload:
    """Builds the workload; its metric is ``"loss"``, in nats per token."""
    sizes: LmModel = config.model
    data: TextData = config.data
    text = open_sequences(
        data.source, sizes.seq_len, data.tokenizer, (data.train_split, data.eval_split)
    )
    if sizes.segments and text.eod is None:
        raise ValueError(
            f"model.segments=True needs documents, and data.source="
            f"{config.data.source!r} has no token between them; use "
            "--config.model.segments=False."
        )
    train = limited(text.train, data.train_examples, "train")
    return make_workload(
        config,
        task_of,
        text.task_info,
        task_files=text.task_files,
        stages=Stages(train, text.decode),
        evaluated=Stages(text.validation, text.decode),
        keeps_evaluated=True,
        data_metadata={**text.metadata, "train_examples": len(train)},
    )


def task_of(config: RunSpec, task_info: Mapping[str, Any]) -> LanguageModel:
    """Returns the task for text with these ``vocab``, ``eod``, ``bytes_per_token``."""
    sizes: LmModel = config.model
    known = task_info["vocab"]
    vocab = sizes.vocab or known
    if vocab < known:
        raise ValueError(
            f"model.vocab={vocab} is less than the {known} tokens of "
            f"data.source={config.data.source!r}; use --config.model.vocab={known}."
        )
    names = ("d_model", "num_layers", "num_heads", "d_ff", "dropout")
    names += ("positions", "activation", "bias", "tied")
    model = Transformer(
        **{name: sizes[name] for name in names},
        vocab=vocab,
        max_len=sizes.seq_len,
        dtype=jnp.dtype(config.precision.compute),
    )
    return LanguageModel(
        model,
        eod=task_info["eod"] if sizes.segments else None,
        bytes_per_token=task_info["bytes_per_token"],
    )
