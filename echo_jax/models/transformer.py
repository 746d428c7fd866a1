"""A decoder-only Transformer language model (Vaswani et al. 2017), pre-norm."""

import flax.linen as nn
import jax
import jax.numpy as jnp

__all__ = ["Transformer"]


class Transformer(nn.Module):
    """Maps tokens to the logits of the next token.

    Layer norms come before each sub-layer, so that training needs no delicate
    warm-up (Xiong et al. 2020). Positions are learned: one addition, the cheapest
    choice on a CPU, and `max_len` is short here. Head and embedding are not tied:
    a vocabulary of bytes costs little, and the two want different scales. The head
    starts at zero, so an untrained model gives every token the same probability.

    Attributes:
      vocab: Number of tokens.
      d_model: Width of the residual stream; a multiple of `num_heads`.
      num_layers: Number of blocks.
      num_heads: Attention heads per block.
      d_ff: Width of the hidden layer of each feed-forward part.
      max_len: Longest sequence, in tokens.
      dropout: Probability of dropping an activation of the embedding and of each
        sub-layer's output.
      dtype: Of the computation; parameters and logits are float32.

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

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool) -> jax.Array:
        """Predicts every next token from the tokens up to it.

        Args:
          tokens: ``int32[B, T]`` with T at most `max_len`.
          train: Whether to drop activations; needs the ``"dropout"`` rng then,
            unless `dropout` is 0.

        Returns:
          Logits, ``float32[B, T, vocab]``; entry t is about token t + 1.

        Raises:
          ValueError: If the sequence is too long, or the heads do not divide the
            width.
        """
        length = tokens.shape[-1]
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
        x = nn.Embed(self.vocab, self.d_model, dtype=self.dtype, name="embed")(tokens)
        positions = self.param(
            "positions",
            nn.initializers.normal(stddev=self.d_model**-0.5),
            (self.max_len, self.d_model),
        )
        # (1, T, D), not (T, D): ranks are promoted nowhere in this project.
        x = x + positions[None, :length].astype(self.dtype)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        for i in range(self.num_layers):
            x = _Block(
                num_heads=self.num_heads,
                d_ff=self.d_ff,
                num_layers=self.num_layers,
                dropout=self.dropout,
                dtype=self.dtype,
                name=f"block_{i}",
            )(x, train=train)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        # The loss is a difference of large numbers: bfloat16 logits would round it.
        return nn.Dense(
            self.vocab,
            use_bias=False,
            dtype=jnp.float32,
            kernel_init=nn.initializers.zeros,
            name="head",
        )(x)


class _Block(nn.Module):
    """Causal self-attention, then a feed-forward part; both residual."""

    num_heads: int
    d_ff: int
    num_layers: int
    dropout: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        batch, length, width = x.shape

        def dense(features: int, name: str, scale: float = 1.0) -> nn.Dense:
            return nn.Dense(
                features,
                use_bias=False,
                dtype=self.dtype,
                kernel_init=nn.initializers.variance_scaling(
                    scale, "fan_in", "truncated_normal"
                ),
                name=name,
            )

        def drop(y: jax.Array) -> jax.Array:
            return nn.Dropout(self.dropout, deterministic=not train)(y)

        # 2 * num_layers branches add up in the residual stream; scaled so, the
        # sum starts with the variance of one (Radford et al. 2019).
        branch_scale = 1 / (2 * self.num_layers)

        y = nn.LayerNorm(dtype=self.dtype, name="attention_norm")(x)
        qkv = dense(3 * width, "qkv")(y)
        qkv = qkv.reshape(batch, length, 3, self.num_heads, width // self.num_heads)
        y = jax.nn.dot_product_attention(
            qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True
        )
        y = dense(width, "attention_out", branch_scale)(y.reshape(x.shape))
        x = x + drop(y)

        y = nn.LayerNorm(dtype=self.dtype, name="ff_norm")(x)
        y = nn.gelu(dense(self.d_ff, "ff_in")(y))
        return x + drop(dense(width, "ff_out", branch_scale)(y))
