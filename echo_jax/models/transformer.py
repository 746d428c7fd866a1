"""A decoder-only Transformer language model (Vaswani et al. 2017), pre-norm."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

_POSITIONS = ("learned", "sinusoidal")
_ACTIVATIONS = {"gelu": nn.gelu, "relu": nn.relu}


class Transformer(nn.Module):
    """Maps tokens to the logits of the next token.

    Layer norms come before each sub-layer, so that training needs no delicate
    warm-up (Xiong et al. 2020). The defaults suit a small model of bytes: positions
    are learned, and head and embedding are not tied. Such a vocabulary costs little,
    and head and embedding need different scales. The untied head starts at zero, so an
    untrained model gives every token the same probability.

    Attributes:
      vocab: Number of tokens.
      d_model: Width of the residual stream; a multiple of `num_heads`.
      num_layers: Number of blocks.
      num_heads: Attention heads per block.
      d_ff: Width of the hidden layer of each feed-forward part.
      max_len: Longest sequence, in tokens.
      dropout: Probability of dropping an activation of the embedding and of each
        sub-layer's output.
      dtype: The type of the computation; parameters, softmax and logits are float32.
      positions: ``"learned"`` or ``"sinusoidal"`` (Vaswani et al. 2017, section 3.5).
        With sinusoids, embeddings are multiplied by the root of the width, as in the
        paper, and the logits of a tied head are divided by it. Otherwise an untrained
        model would expect every token to follow itself.
      activation: ``"gelu"`` (its tanh form, as in GPT-2) or ``"relu"``.
      bias: Whether the dense layers of the blocks have biases.
      tied: Whether the head is the embedding, transposed (Press and Wolf 2017).

    Example:
      >>> model = Transformer(
      ...     vocab=256, d_model=64, num_layers=2, num_heads=4, d_ff=256, max_len=128
      ... )
      >>> tokens = jnp.zeros((8, 128), jnp.int32)
      >>> variables = model.init(jax.random.key(0), tokens, train=False)
      >>> model.apply(variables, tokens, train=False).shape
      (8, 128, 256)
    """

    vocab: int
    d_model: int
    num_layers: int
    num_heads: int
    d_ff: int
    max_len: int
    dropout: float = 0.0
    dtype: jnp.dtype = jnp.float32
    positions: str = "learned"
    activation: str = "gelu"
    bias: bool = False
    tied: bool = False

    @nn.compact
    def __call__(
        self, tokens: jax.Array, *, train: bool, segments: jax.Array | None = None
    ) -> jax.Array:
        """Predicts every next token from the tokens up to it.

        Args:
          tokens: ``int32[B, T]`` with T at most `max_len`.
          train: Whether to drop activations; needs the ``"dropout"`` rng then,
            unless `dropout` is 0.
          segments: The document of every token, ``int32[B, T]``, if a sequence holds
            several documents one after another. Tokens attend only to their own
            document, and its positions start at 0. None: a sequence is one document.

        Returns:
          Logits, ``float32[B, T, vocab]``; entry t predicts token t + 1.

        Raises:
          ValueError: The sequence is too long, the heads do not divide the width,
            or a choice is unknown.
        """
        self._check(tokens.shape[-1])
        embed = nn.Embed(self.vocab, self.d_model, dtype=self.dtype, name="embed")
        x = self._add_positions(embed(tokens), segments)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        for i in range(self.num_layers):
            x = _Block(
                num_heads=self.num_heads,
                d_ff=self.d_ff,
                num_layers=self.num_layers,
                dropout=self.dropout,
                dtype=self.dtype,
                activation=_ACTIVATIONS[self.activation],
                bias=self.bias,
                name=f"block_{i}",
            )(x, train=train, segments=segments)
        x = _norm(x, self.dtype, "norm")
        # The loss is a difference of large numbers: bfloat16 logits would round it.
        if self.tied:
            table = embed.embedding.astype(self.dtype)
            logits = jnp.einsum(
                "btd,vd->btv", x, table, preferred_element_type=jnp.float32
            )
            return logits if self.positions == "learned" else logits / self._scale
        return nn.Dense(
            self.vocab,
            use_bias=False,
            dtype=jnp.float32,
            kernel_init=nn.initializers.zeros,
            name="head",
        )(x)

    @property
    def _scale(self) -> float:
        """The scale of embeddings beside sinusoids of variance 1/2 (section 3.4)."""
        return self.d_model**0.5

    def _check(self, length: int) -> None:
        if length > self.max_len:
            raise ValueError(
                f"a sequence of {length} tokens is longer than max_len={self.max_len}; "
                f"use max_len={length}"
            )
        if self.d_model % self.num_heads:
            raise ValueError(
                f"d_model={self.d_model} is not a multiple of "
                f"num_heads={self.num_heads}; change one of them"
            )
        for name, known in (("positions", _POSITIONS), ("activation", _ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; use one of "
                    f"{', '.join(known)}"
                )

    def _add_positions(self, x: jax.Array, segments: jax.Array | None) -> jax.Array:
        if self.positions == "learned":
            table = self.param(
                "positions",
                nn.initializers.normal(stddev=self.d_model**-0.5),
                (self.max_len, self.d_model),
            )
        else:
            table = _sinusoids(self.max_len, self.d_model)
            x = x * jnp.asarray(self._scale, x.dtype)
        if segments is None:
            # (1, T, D), not (T, D): this project never promotes ranks.
            return x + table[None, : x.shape[1]].astype(self.dtype)
        return x + table[_positions_in(segments)].astype(self.dtype)


def _positions_in(segments: jax.Array) -> jax.Array:
    """Returns the position of each token in its segment, ``int32[B, T]``."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1])[None], segments.shape)
    is_first = segments[:, 1:] != segments[:, :-1]
    starts = jnp.where(jnp.pad(is_first, ((0, 0), (1, 0))), index, 0)
    return index - jax.lax.cummax(starts, axis=1)


# The paper alternates sines and cosines, which differs only in the order of columns.
def _sinusoids(length: int, width: int) -> jax.Array:
    """Returns sines in the first half of the columns and cosines in the second."""
    rates = 10_000 ** (-jnp.arange(0, width, 2) / width)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * rates[None]
    table = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
    return table[:, :width]


def _norm(x: jax.Array, dtype: jnp.dtype, name: str) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):  # Flax needs it in bfloat16.
        return nn.LayerNorm(dtype=dtype, name=name)(x)


class _Block(nn.Module):
    num_heads: int
    d_ff: int
    num_layers: int
    dropout: float
    dtype: jnp.dtype
    activation: Callable[[jax.Array], jax.Array]
    bias: bool

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool, segments: jax.Array | None
    ) -> jax.Array:
        batch, length, width = x.shape

        def dense(features: int, name: str, scale: float = 1.0) -> nn.Dense:
            return nn.Dense(
                features,
                use_bias=self.bias,
                dtype=self.dtype,
                kernel_init=nn.initializers.variance_scaling(
                    scale, "fan_in", "truncated_normal"
                ),
                name=name,
            )

        def drop(y: jax.Array) -> jax.Array:
            return nn.Dropout(self.dropout, deterministic=not train)(y)

        # 2 * num_layers branches add up in the residual stream. With this scale,
        # the sum starts with the variance of one branch (Radford et al. 2019).
        branch_scale = 1 / (2 * self.num_layers)

        y = _norm(x, self.dtype, "attention_norm")
        qkv = dense(3 * width, "qkv")(y)
        qkv = qkv.reshape(batch, length, 3, self.num_heads, width // self.num_heads)
        is_strict = jax.numpy_dtype_promotion.value == "strict"
        if self.dtype == jnp.float16 or is_strict:
            # jax asks for a product of float16 that CPUs and TPUs do not have, and
            # where types must not be promoted, it compiles none of bfloat16.
            qkv = qkv.astype(jnp.float32)
        mask = None
        if segments is not None:
            mask = (segments[:, :, None] == segments[:, None, :])[:, None]
        with jax.numpy_dtype_promotion("standard"):  # Jax needs it in bfloat16.
            y = jax.nn.dot_product_attention(
                qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], mask=mask, is_causal=True
            )
        y = dense(width, "attention_out", branch_scale)(y.reshape(x.shape))
        x = x + drop(y)

        y = _norm(x, self.dtype, "ff_norm")
        y = self.activation(dense(self.d_ff, "ff_in")(y))
        return x + drop(dense(width, "ff_out", branch_scale)(y))
