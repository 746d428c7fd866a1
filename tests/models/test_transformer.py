import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.models import Transformer

SIZES = {
    "vocab": 11,
    "d_model": 8,
    "num_layers": 2,
    "num_heads": 2,
    "d_ff": 16,
    "max_len": 6,
}
TOKENS = np.random.default_rng(0).integers(0, 11, (3, 6)).astype(np.int32)


@functools.cache
def init(model):
    return model.init(jax.random.key(0), TOKENS, train=False)


def with_random_head(variables):
    """The head starts at zero; random, so that the logits depend on the rest."""
    params = dict(variables["params"])
    kernel = params["head"]["kernel"]
    params["head"] = {"kernel": jax.random.normal(jax.random.key(9), kernel.shape)}
    return {"params": params}


def test_number_of_parameters():
    # Per block: two norms (2 * 2d), qkv (3 d^2), out (d^2), feed-forward (2 d f).
    d, f, vocab, max_len = 8, 16, 11, 6
    block = 4 * d + 4 * d * d + 2 * d * f
    expected = vocab * d + max_len * d + 2 * block + 2 * d + d * vocab
    params = init(Transformer(**SIZES))["params"]
    assert sum(x.size for x in jax.tree.leaves(params)) == expected


def test_untrained_model_predicts_uniformly():
    model = Transformer(**SIZES)
    logits = model.apply(init(model), TOKENS, train=False)
    np.testing.assert_array_equal(logits, np.zeros((3, 6, 11), np.float32))


def test_a_token_changes_no_earlier_prediction_and_all_later_ones():
    model = Transformer(**SIZES)
    variables = with_random_head(init(model))
    changed = TOKENS.copy()
    changed[:, 3] = (changed[:, 3] + 1) % 11
    before = model.apply(variables, TOKENS, train=False)
    after = model.apply(variables, changed, train=False)
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert (np.abs(before - after)[:, 3:].max(axis=-1) > 1e-4).all()


def test_positions_matter():
    model = Transformer(**SIZES)
    variables = with_random_head(init(model))
    logits = model.apply(variables, np.full((1, 6), 4, np.int32), train=False)
    assert float(jnp.abs(logits[0, 1:] - logits[0, :-1]).max(axis=-1).min()) > 1e-4


def test_dropout_follows_its_key_and_is_off_in_evaluation():
    model = Transformer(**SIZES, dropout=0.5)
    variables = with_random_head(init(model))

    def apply(train, key):
        rngs = {"dropout": jax.random.key(key)}
        return np.asarray(model.apply(variables, TOKENS, train=train, rngs=rngs))

    np.testing.assert_array_equal(apply(True, 1), apply(True, 1))
    assert (apply(True, 1) != apply(True, 2)).any()
    np.testing.assert_array_equal(apply(False, 1), apply(False, 2))


def test_computes_in_bfloat16_with_float32_parameters_and_logits():
    model = Transformer(**SIZES, dtype=jnp.bfloat16)
    variables = with_random_head(init(model))
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    logits, state = model.apply(
        variables, TOKENS, train=False, capture_intermediates=True
    )
    blocks = state["intermediates"]["block_0"]["__call__"]
    assert blocks[0].dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32


def test_refuses_a_long_sequence_and_odd_heads():
    with pytest.raises(ValueError, match=r"7 tokens is longer than max_len=6"):
        Transformer(**SIZES).init(
            jax.random.key(0), np.zeros((1, 7), np.int32), train=False
        )
    with pytest.raises(ValueError, match=r"d_model=8 is not a multiple of num_heads=3"):
        init(Transformer(**{**SIZES, "num_heads": 3}))
