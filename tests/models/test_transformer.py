import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow_but_for

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
    # Compiled as a whole: one operation after the other takes seconds.
    return jax.jit(functools.partial(model.init, train=False))(
        jax.random.key(0), TOKENS
    )


@functools.partial(jax.jit, static_argnums=0)
def predict(model, variables, tokens, segments=None):
    return model.apply(variables, tokens, train=False, segments=segments)


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
    logits = predict(model, init(model), TOKENS)
    np.testing.assert_array_equal(logits, np.zeros((3, 6, 11), np.float32))


def test_a_token_changes_no_earlier_prediction_and_all_later_ones():
    model = Transformer(**SIZES)
    variables = with_random_head(init(model))
    changed = TOKENS.copy()
    changed[:, 3] = (changed[:, 3] + 1) % 11
    before = predict(model, variables, TOKENS)
    after = predict(model, variables, changed)
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert (np.abs(before - after)[:, 3:].max(axis=-1) > 1e-4).all()


def test_positions_matter():
    model = Transformer(**SIZES)
    variables = with_random_head(init(model))
    logits = predict(model, variables, np.full((3, 6), 4, np.int32))
    assert float(jnp.abs(logits[0, 1:] - logits[0, :-1]).max(axis=-1).min()) > 1e-4


def test_dropout_follows_its_key_and_is_off_in_evaluation():
    model = Transformer(**SIZES, dropout=0.5)
    variables = with_random_head(init(model))

    @functools.partial(jax.jit, static_argnums=0)
    def apply(train, key):
        rngs = {"dropout": jax.random.key(key)}
        return model.apply(variables, TOKENS, train=train, rngs=rngs)

    np.testing.assert_array_equal(apply(True, 1), apply(True, 1))
    assert (apply(True, 1) != apply(True, 2)).any()
    np.testing.assert_array_equal(apply(False, 1), apply(False, 2))


def test_computes_in_bfloat16_with_float32_parameters_and_logits():
    model = Transformer(**SIZES, dtype=jnp.bfloat16)
    variables = with_random_head(init(model))
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    logits, state = jax.eval_shape(
        lambda v: model.apply(v, TOKENS, train=False, capture_intermediates=True),
        variables,
    )
    blocks = state["intermediates"]["block_0"]["__call__"]
    assert blocks[0].dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32


def test_gpt2_small_has_its_published_number_of_parameters():
    # Radford et al. 2019: 12 layers of width 768 on 50,257 tokens, 1024 in a row.
    model = Transformer(
        vocab=50_257,
        d_model=768,
        num_layers=12,
        num_heads=12,
        d_ff=3072,
        max_len=1024,
        bias=True,
        tied=True,
    )
    tokens = jnp.zeros((1, 1024), jnp.int32)
    shapes = jax.eval_shape(
        lambda key: model.init(key, tokens, train=False), jax.random.key(0)
    )
    assert sum(x.size for x in jax.tree.leaves(shapes)) == 124_439_808


def softmax(x):
    chances = np.exp(x - x.max(axis=-1, keepdims=True))
    return chances / chances.sum(axis=-1, keepdims=True)


def layer_norm(x, p):
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)
    return scaled * p["scale"] + p["bias"]


def dense(x, p):
    return x @ p["kernel"] + p.get("bias", 0.0)


def block_by_hand(x, p, *, num_heads, activation, segments):
    """The equations of Vaswani et al. 2017, head by head and token by token."""
    length, width = x.shape
    size = width // num_heads
    query, key, value = np.split(
        dense(layer_norm(x, p["attention_norm"]), p["qkv"]), 3, axis=1
    )
    heads = np.zeros_like(x)
    for h in range(num_heads):
        mine = slice(h * size, (h + 1) * size)
        for t in range(length):
            seen = [s for s in range(t + 1) if segments[s] == segments[t]]
            scores = key[seen, mine] @ query[t, mine] / np.sqrt(size)
            heads[t, mine] = softmax(scores) @ value[seen, mine]
    x = x + dense(heads, p["attention_out"])
    hidden = activation(dense(layer_norm(x, p["ff_norm"]), p["ff_in"]))
    return x + dense(hidden, p["ff_out"])


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def relu(x):
    return np.maximum(x, 0)


def sinusoids(length, width):
    """Vaswani et al. 2017, section 3.5, with the sines before the cosines."""
    angle = [
        [t / 10_000 ** (2 * i / width) for i in range(width // 2)]
        for t in range(length)
    ]
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1)


VARIANTS = {
    "bytes": {},
    "gpt2": {"bias": True, "tied": True},
    "base": {
        "bias": True,
        "tied": True,
        "positions": "sinusoidal",
        "activation": "relu",
    },
}


def by_hand(p, tokens, segments, variant):
    """The logits of a window, ``[T, vocab]``."""
    # Where a token stands in its document.
    starts = [segments.index(s) for s in segments]
    position = np.arange(len(tokens)) - starts
    x = p["embed"]["embedding"][tokens]
    if variant.get("positions") == "sinusoidal":
        x = x * np.sqrt(8) + sinusoids(6, 8)[position]
    else:
        x = x + p["positions"][position]
    for i in range(2):
        activation = relu if variant.get("activation") == "relu" else gelu
        x = block_by_hand(
            x,
            p[f"block_{i}"],
            num_heads=2,
            activation=activation,
            segments=segments,
        )
    x = layer_norm(x, p["norm"])
    head = p["embed"]["embedding"].T if variant.get("tied") else p["head"]["kernel"]
    logits = x @ head
    return logits / np.sqrt(8) if variant.get("positions") == "sinusoidal" else logits


@pytest.mark.parametrize("name", slow_but_for(["gpt2"], VARIANTS))
def test_an_untrained_model_knows_nothing(name):
    sizes = {**SIZES, "vocab": 4000, "d_model": 512, "num_heads": 8}
    model = Transformer(**sizes, **VARIANTS[name])
    tokens = np.random.default_rng(0).integers(0, 4000, (32, 7))
    variables = init(model)
    log_probs = jax.nn.log_softmax(predict(model, variables, tokens[:, :-1]))
    loss = -np.take_along_axis(log_probs, tokens[:, 1:, None], -1).mean()
    # Logits of GPT-2's tied head have a variance of 1, and half of it is the loss's.
    assert loss == pytest.approx(np.log(4000), rel=0.07 if name == "gpt2" else 0.01)


@pytest.mark.parametrize(
    ("name", "segments"),
    [("bytes", [0] * 6), ("gpt2", [3, 3, 4, 4, 4, 5]), ("base", [0, 0, 0, 1, 1, 1])],
)
def test_logits_equal_those_of_the_equations(name, segments):
    model = Transformer(**SIZES, **VARIANTS[name])
    rng = np.random.default_rng(1)
    variables = jax.tree.map(
        lambda x: x + rng.normal(0, 0.3, x.shape).astype(np.float32),
        jax.device_get(init(model)),
    )
    packed = np.tile(segments, (3, 1)) if len(set(segments)) > 1 else None
    logits = predict(model, variables, TOKENS, packed)
    exact = jax.tree.map(lambda x: x.astype(np.float64), variables["params"])
    expected = [by_hand(exact, row, segments, VARIANTS[name]) for row in TOKENS]
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_tied_head_computes_in_half_precision_and_answers_in_float32(dtype):
    model = Transformer(**SIZES, **VARIANTS["gpt2"], dtype=dtype)
    variables = init(model)
    logits = predict(model, variables, TOKENS)
    assert logits.dtype == jnp.float32
    exact = Transformer(**SIZES, **VARIANTS["gpt2"])
    np.testing.assert_allclose(logits, predict(exact, variables, TOKENS), atol=0.1)
    # More digits than the type has: nothing was rounded on the way out.
    assert (logits != logits.astype(dtype).astype(jnp.float32)).any()


@pytest.mark.parametrize("field", ["positions", "activation"])
def test_refuses_an_unknown_choice(field):
    with pytest.raises(ValueError, match=f"{field}='huge' is unknown; use one of"):
        init(Transformer(**SIZES, **{field: "huge"}))


def test_refuses_a_long_sequence_and_odd_heads():
    with pytest.raises(ValueError, match=r"7 tokens is longer than max_len=6"):
        Transformer(**SIZES).init(
            jax.random.key(0), np.zeros((1, 7), np.int32), train=False
        )
    with pytest.raises(ValueError, match=r"d_model=8 is not a multiple of num_heads=3"):
        init(Transformer(**{**SIZES, "num_heads": 3}))
