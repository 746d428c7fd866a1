import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import echo_jax as ej
from echo_jax.inference.generate import Generator
from echo_jax.models.transformer import Transformer
from echo_jax.workloads.lm import LanguageModel

T, VOCAB = 8, 11
MODEL = Transformer(
    vocab=VOCAB, d_model=8, num_layers=1, num_heads=2, d_ff=8, max_len=T, tied=True
)
TASK = LanguageModel(MODEL)


@functools.cache
def untrained():
    return jax.jit(TASK.init)(jax.random.key(3))


@jax.jit
def logits_of(tokens):
    """Of the token behind a text, without padding."""
    return MODEL.apply(untrained(), tokens[None], train=False)[0, -1]


def make(vocab=VOCAB, eod=None, variables=None):
    return Generator(TASK, variables or untrained(), vocab, eod)


def always(token):
    """Variables of a model that is sure of one token: its embedding is the mean's."""
    table = np.zeros((VOCAB, 8), np.float32)
    table[token] = 50.0
    params = {**untrained()["params"], "embed": {"embedding": jnp.asarray(table)}}
    params["norm"] = {"scale": jnp.zeros(8), "bias": jnp.ones(8)}
    return {"params": params}


@pytest.mark.slow
def test_the_likeliest_token_is_that_of_the_whole_text_alone():
    """By an independent way: one text, no padding, the last T tokens."""
    prompts = [[1], [2, 3, 4], [5] * T, [*range(VOCAB)]]
    found = make()(prompts, 6, temperature=0.0, seed=0)
    for prompt, added in zip(prompts, found, strict=True):
        text = list(prompt)
        for token in added:
            assert token == int(logits_of(jnp.asarray(text[-T:])).argmax())
            text.append(token)
        assert len(added) == 6


def test_what_is_drawn_follows_the_probabilities_and_the_seed():
    prompts = [[1, 2]] * 2000
    drawn = np.array(make()(prompts, 1, temperature=1.0, seed=5))[:, 0]
    wanted = np.asarray(jax.nn.softmax(logits_of(jnp.asarray([1, 2]))))
    counted = np.bincount(drawn, minlength=VOCAB) / len(drawn)
    # Four standard deviations of a count.
    assert (np.abs(counted - wanted) < 4 * np.sqrt(wanted / len(drawn))).all()
    again = make()(prompts, 1, temperature=1.0, seed=5)
    assert np.array(again)[:, 0].tolist() == drawn.tolist()
    other = make()(prompts, 1, temperature=1.0, seed=6)
    assert np.array(other)[:, 0].tolist() != drawn.tolist()


def test_a_document_ends_and_its_end_is_left_out():
    ended, going = make(eod=4, variables=always(4)), make(eod=4, variables=always(6))
    assert ended([[1], []], 5, temperature=0.0, seed=0) == [[], []]
    assert going([[1], []], 3, temperature=0.0, seed=0) == [[6] * 3] * 2


def test_tokens_that_no_tokenizer_knows_are_never_drawn():
    drawn = make(vocab=3, variables=always(6))([[1]] * 50, 4, temperature=1.0, seed=0)
    assert np.array(drawn).max() < 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokens": 0}, "tokens=0 must be at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0 must be at least 0"),
        ({"prompts": [""]}, "an empty text cannot be continued"),
    ],
)
def test_what_cannot_be_is_refused(options, says, lm_run):
    run = ej.load_run(lm_run[0])
    with pytest.raises(ValueError, match=says):
        run.generate(**{"prompts": ["x"], **options})


def test_images_are_no_text(shapes_run):
    with pytest.raises(ValueError, match="was trained on images, and continues no te"):
        ej.load_run(shapes_run[0]).generate(["x"])
