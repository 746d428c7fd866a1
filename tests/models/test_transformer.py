"""The Transformer, compared with its equations, token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.models import Transformer

pytestmark = pytest.mark.usefixtures("all_compiled_soon")

SIZES = {"vocab": 11, "d_model": 8, "num_layers": 2, "num_heads": 2}
SIZES |= {"d_ff": 16, "max_len": 6}
TOKENS = np.random.default_rng(0).integers(0, 11, (3, 6)).astype(np.int32)
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


@functools.cache
def init(model):
    # Compiled as a whole: one operation after the other takes seconds.
    return jax.jit(functools.partial(model.init, train=False))(
        jax.random.key(0), TOKENS
    )


@functools.partial(jax.jit, static_argnums=0)
def predict(model, variables, tokens, segments=None):
    return model.apply(variables, tokens, train=False, segments=segments)


def num_parameters(**fields):
    model, tokens = Transformer(**fields), jnp.zeros((1, 6), jnp.int32)
    make = functools.partial(model.init, train=False)
    shapes = jax.eval_shape(make, jax.random.key(0), tokens)["params"]
    return sum(x.size for x in jax.tree.leaves(shapes))


def test_the_number_of_parameters_is_the_published_one():
    # GPT-2 small, by Radford et al. 2019.
    gpt2 = {"vocab": 50_257, "d_model": 768, "num_layers": 12, "num_heads": 12}
    gpt2 |= {"d_ff": 3072, "max_len": 1024, **VARIANTS["gpt2"]}
    assert num_parameters(**gpt2) == 124_439_808


def softmax(x):
    chances = np.exp(x - x.max(axis=-1, keepdims=True))
    return chances / chances.sum(axis=-1, keepdims=True)


def layer_norm(x, p):
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6)
    return scaled * p["scale"] + p["bias"]


def dense(x, p):
    return x @ p["kernel"] + p.get("bias", 0.0)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def block_by_hand(x, p, activation, segments):
    """The equations of Vaswani et al. 2017, head by head and token by token."""
    size = x.shape[1] // 2
    qkv = dense(layer_norm(x, p["attention_norm"]), p["qkv"])
    query, key, value = np.split(qkv, 3, axis=1)
    heads = np.zeros_like(x)
    for mine in (slice(0, size), slice(size, None)):
        for t in range(len(x)):
            seen = [s for s in range(t + 1) if segments[s] == segments[t]]
            scores = key[seen, mine] @ query[t, mine] / np.sqrt(size)
            heads[t, mine] = softmax(scores) @ value[seen, mine]
    x = x + dense(heads, p["attention_out"])
    hidden = activation(dense(layer_norm(x, p["ff_norm"]), p["ff_in"]))
    return x + dense(hidden, p["ff_out"])


def by_hand(p, tokens, segments, name):
    """The logits of a window, ``[T, vocab]``."""
    is_base = name == "base"
    # Where a token stands in its document.
    position = np.arange(len(tokens)) - [segments.index(s) for s in segments]
    x = p["embed"]["embedding"][tokens]
    if is_base:
        # Section 3.5, with the sines before the cosines.
        angle = position[:, None] / 10_000 ** (np.arange(0, 8, 2) / 8)
        x = x * np.sqrt(8) + np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    else:
        x = x + p["positions"][position]
    activation = (lambda x: np.maximum(x, 0)) if is_base else gelu
    for i in range(2):
        x = block_by_hand(x, p[f"block_{i}"], activation, segments)
    x = layer_norm(x, p["norm"])
    if name == "bytes":
        return x @ p["head"]["kernel"]
    logits = x @ p["embed"]["embedding"].T
    return logits / np.sqrt(8) if is_base else logits


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
    expected = [by_hand(exact, row, segments, name) for row in TOKENS]
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_an_untrained_model_knows_nothing(name):
    sizes = {**SIZES, "vocab": 400, "d_model": 128, "num_heads": 8}
    model = Transformer(**sizes, **VARIANTS[name])
    tokens = np.random.default_rng(0).integers(0, 400, (64, 7))
    variables = init(model)
    log_probs = jax.nn.log_softmax(predict(model, variables, tokens[:, :-1]))
    loss = -np.take_along_axis(log_probs, tokens[:, 1:, None], -1).mean()
    # Logits of GPT-2's tied head have a variance of 1, and half of it is the loss's.
    wrong = 0.12 if name == "gpt2" else 0.02 if name == "base" else 1e-4
    assert loss == pytest.approx(np.log(400), rel=wrong)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_model_computes_in_half_precision_and_answers_in_float32(dtype):
    model = Transformer(**SIZES, **VARIANTS["gpt2"], dtype=dtype)
    variables = init(model)
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    apply = functools.partial(model.apply, train=False, capture_intermediates=True)
    _, state = jax.eval_shape(apply, variables, TOKENS)
    assert state["intermediates"]["block_0"]["__call__"][0].dtype == dtype
    logits = predict(model, variables, TOKENS)
    assert logits.dtype == jnp.float32
    exact = Transformer(**SIZES, **VARIANTS["gpt2"])
    np.testing.assert_allclose(logits, predict(exact, variables, TOKENS), atol=0.1)
    # More digits than the type has: nothing was rounded on the way out.
    assert (logits != logits.astype(dtype).astype(jnp.float32)).any()
