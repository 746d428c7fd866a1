"""The workload lm: windows of bytes and of documents, its loss and its metrics."""

import dataclasses
import itertools
import lzma
import math
import os
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from text_folders import prepare

import echo_jax as ej
from echo_jax.config import load_config
from echo_jax.data.prepare import Settings, TextSettings, prepare_text
from echo_jax.models import Transformer
from echo_jax.runs import run_train
from echo_jax.workloads import build, lm

EOD, SEQ_LEN = 10, 12
SIZES = {"d_model": 8, "num_layers": 2, "num_heads": 2, "d_ff": 16, "max_len": SEQ_LEN}
PLAIN = lm.LanguageModel(Transformer(vocab=11, **SIZES))
APART = dataclasses.replace(PLAIN, eod=EOD)
DROPPING = lm.LanguageModel(Transformer(vocab=11, **SIZES, dropout=0.5))

# Compiled once for each task: tasks are equal by value. Eager models take seconds.
loss = jax.jit(lm.LanguageModel.loss, static_argnums=0)
judge = jax.jit(lm.LanguageModel.evaluate, static_argnums=0)
KEY = jax.random.key(0)

# Dropout or a mask that is not heeded shows in far more than the last bit.
pytestmark = pytest.mark.usefixtures("all_compiled_soon")


@pytest.fixture(scope="module")
def variables():
    """Variables of which none is zero, so that every input matters."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: rng.normal(0, 0.5, x.shape).astype(np.float32),
        jax.eval_shape(PLAIN.init, KEY),
    )


def nats(task, variables, tokens):
    """The loss of every predicted token, from the task's logits."""
    logits = predict(task, variables, {"tokens": tokens[:, :-1]})["logits"]
    log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
    return -np.take_along_axis(log_p, tokens[:, 1:, None].astype(int), axis=-1)[..., 0]


predict = jax.jit(lm.LanguageModel.predict, static_argnums=0)


def window(*documents):
    """A window of documents, and how many of its tokens are no filling."""
    tokens = [EOD]
    for document in documents:
        tokens += [*document, EOD]
    filling = [EOD] * (SEQ_LEN + 1 - len(tokens))
    return np.array(tokens + filling, np.uint16), len(tokens)


def batch_of(*windows):
    tokens, lengths = zip(*windows, strict=True)
    return {"tokens": np.stack(tokens), "length": np.array(lengths, np.int32)}


A, B, C = [1, 2, 3], [4, 5, 6, 7], [8, 1]
ALL_REAL = np.ones(3, np.float32)


@pytest.fixture
def tokens():
    return np.random.default_rng(0).integers(0, 11, (3, SEQ_LEN + 1), np.uint8)


def test_loss_is_about_the_next_token(variables, tokens):
    """The last token is predicted and never read, the first read and not predicted."""
    apply = jax.jit(PLAIN.model.apply, static_argnames="train")
    logits = apply(variables, jnp.int32(tokens[:, :-1]), train=False)
    found = predict(PLAIN, variables, {"tokens": tokens[:, :-1]})["logits"]
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-5)
    losses, others, metrics = loss(PLAIN, variables, {"tokens": tokens}, KEY)
    assert losses.shape == (3,) and losses.dtype == jnp.float32 and others == {}
    expected = nats(PLAIN, variables, tokens)
    np.testing.assert_allclose(losses, expected.mean(axis=1), rtol=1e-5)
    assert metrics == {"tokens_per_update": (expected.size, 1)}
    total, count = judge(PLAIN, variables, {"tokens": tokens, "mask": ALL_REAL})["loss"]
    assert count == 3 * SEQ_LEN
    np.testing.assert_allclose(total, expected.sum(), rtol=1e-5)
    mask = np.float32([1, 0, 1])
    total, count = judge(PLAIN, variables, {"tokens": tokens, "mask": mask})["loss"]
    assert count == 2 * SEQ_LEN
    np.testing.assert_allclose(total, expected[[0, 2]].sum(), rtol=1e-5)


def test_dropout_follows_its_key_and_spares_evaluation(variables, tokens):
    batch = {"tokens": tokens, "mask": ALL_REAL}
    first, again, other = (
        np.asarray(loss(DROPPING, variables, batch, jax.random.key(seed))[0])
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()
    spared, plain = (judge(task, variables, batch) for task in (DROPPING, PLAIN))
    assert spared["loss"][0] == plain["loss"][0]


def test_packed_documents_are_predicted_as_if_alone(variables):
    together = batch_of(window(A, B, C))["tokens"]
    packed = nats(APART, variables, together)
    each = nats(APART, variables, batch_of(window(A), window(B), window(C))["tokens"])
    expected = [each[i, : len(document) + 1] for i, document in enumerate((A, B, C))]
    np.testing.assert_allclose(packed[0], np.concatenate(expected), rtol=1e-4)
    # Without segments, what stands before a document tells something.
    plain = nats(PLAIN, variables, together)
    assert (np.abs(plain[0, :4] - packed[0, :4]) < 1e-4).all()
    assert (np.abs(plain[0, 5:] - packed[0, 5:]) > 1e-3).all()


def test_the_mean_of_a_batch_is_the_mean_over_its_tokens(variables):
    batch = batch_of(window(A, B), window(C), window(B))
    each = nats(APART, variables, batch["tokens"])
    real = np.concatenate([each[i, : n - 1] for i, n in enumerate(batch["length"])])
    losses, others, metrics = loss(APART, variables, batch, KEY)
    assert metrics == {"tokens_per_update": ((4 + 5) + 3 + 5, 1)}
    assert losses.shape == (3,) and others == {} and len(real) == 17
    assert losses.mean() == pytest.approx(real.mean(), rel=1e-5)
    # Filling counts for nothing.
    changed = {**batch, "tokens": batch["tokens"].copy()}
    for row, length in enumerate(batch["length"]):
        changed["tokens"][row, length:] = 7
    np.testing.assert_array_equal(losses, loss(APART, variables, changed, KEY)[0])
    total, count = judge(APART, variables, {**changed, "mask": ALL_REAL})["loss"]
    assert count == 17 and total == pytest.approx(real.sum(), rel=1e-5)
    # The second and third window are filling as a whole.
    mask = np.float32([1, 0, 0])
    assert judge(APART, variables, {**batch, "mask": mask})["loss"][1] == 9


def test_perplexity_is_of_the_mean_and_bits_are_of_bytes():
    derived = dataclasses.replace(PLAIN, bytes_per_token=4.0).derive
    found = derived({"loss": 3 * math.log(2)})
    assert found == pytest.approx({"perplexity": 8, "bits_per_byte": 3 / 4})
    assert PLAIN.derive({"loss": 1e4}) == {"perplexity": math.inf}


def bytes_config(source, **overrides):
    sizes = {"seq_len": 8, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32}
    fields = {f"model.{name}": size for name, size in sizes.items()}
    fields |= {"data.source": str(source), "batch_size": 4, "data.eval_examples": 0}
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config("lm:bytes", {**fields, **named})


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(np.random.default_rng(1).integers(14, 256, 4000, np.uint8)))
    return path


def rows_of(config, count):
    with closing(iter(build(config).train_dataset(ej.EchoSpec()))) as batches:
        taken = itertools.islice(batches, count)
        return {row.tobytes() for batch in taken for row in batch["tokens"]}


def test_a_text_is_trained_on_but_for_its_end(text_file):
    config = bytes_config(text_file)
    workload = build(config)
    assert (workload.name, workload.metric, workload.mode) == ("lm", "loss", "min")
    text = text_file.read_bytes()
    # An epoch of all windows, and a part of the next one.
    windows = {text[i : i + 9] for i in range(0, 3800 - 8, 9)}
    assert rows_of(config, 110) == windows
    first = workload.eval_batches()
    # What a batch is filled up with, too.
    assert all(row.tobytes() in text[3800:] for b in first for row in b["tokens"])
    assert sum(b["mask"].sum() for b in first) == 200 // 9
    # It is decoded once, and is the same for all seeds.
    assert workload.eval_batches() is first
    other = build(bytes_config(text_file, seed=1)).eval_batches()
    for one, two in zip(first, other, strict=True):
        np.testing.assert_array_equal(one["tokens"], two["tokens"])
    metadata = workload.metadata
    data = metadata["data"]
    assert (data["synthetic"], data["train_bytes"]) == (False, 3800)
    assert data["train_examples"] == 3800 // 9 and len(data["sha256"]) == 64
    assert metadata["storage"]["simulated"] is False


def test_a_run_may_know_some_windows_alone_and_always_the_same_ones(text_file):
    configs = [bytes_config(text_file, seed=seed) for seed in (0, 1)]
    for config in configs:
        with config.unlocked():
            config.data.train_examples = 5
    some, again = (rows_of(config, 10) for config in configs)
    assert len(some) == 5 and some == again
    configs[0].data.train_examples = 9999
    with pytest.raises(ValueError, match=r"train_examples=9999 is none of 0 to \d+"):
        build(configs[0])


SMALL = {
    "batch_size": 8,
    "data.workers": 0,
    "mesh.data": 1,
    "model.seq_len": 8,
    "model.d_model": 8,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.d_ff": 8,
}


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    folder = prepare(tmp_path_factory.mktemp("text"))

    def make(variant, **overrides):
        changed = {name.replace("__", "."): v for name, v in overrides.items()}
        return load_config(
            f"lm:{variant}", {**SMALL, "data.source": str(folder), **changed}
        )

    return make


@pytest.mark.parametrize(
    ("variant", "overrides", "named"),
    [
        (
            "wikitext2",
            {"model__positions": "huge"},
            "positions='huge' must be one of learned",
        ),
        ("gpt2", {"model__vocab": 200}, r"model\.vocab=200 is less than the 257"),
        ("wikitext2", {"model__seq_len": 7}, r"model\.seq_len=7 does not divide"),
        ("bytes", {"model__seq_len": 0}, r"model\.seq_len=0 must be at least 1"),
        ("bytes", {"model__num_heads": 3}, "d_model=8 is not a multiple of num_heads"),
        ("bytes", {"model__dropout": 1.0}, r"model\.dropout=1\.0.*below 1"),
    ],
)
def test_what_does_not_fit_is_named(config_of, variant, overrides, named):
    if variant == "bytes":
        overrides = {"data__source": "stdlib", **overrides}
    with pytest.raises(ValueError, match=named):
        build(config_of(variant, **overrides))


def test_fields_and_texts_that_cannot_be_are_named(config_of, tmp_path):
    config = config_of("wikitext2", data__source="stdlib")
    config.model.segments = True
    with pytest.raises(ValueError, match=r"model\.segments=True needs documents"):
        build(config)
    with config.unlocked():
        config.model.depth = 8
    with pytest.raises(ValueError, match=r"model\.depth=8 is no field; .* seq_len"):
        build(config)
    (tmp_path / "short.txt").write_bytes(b"too short to hold out a twentieth")
    with pytest.raises(ValueError, match=r"model\.seq_len"):
        build(bytes_config(tmp_path / "short.txt"))


@pytest.mark.slow
@pytest.mark.skipif("ECHO_JAX_DATA" not in os.environ, reason="needs ECHO_JAX_DATA")
def test_learns_more_of_wikitext_2_than_to_count(tmp_path):
    folder = Path(os.environ["ECHO_JAX_DATA"]) / "wikitext2"
    sizes = {"train": 800_000, "valid": 100_000}
    for file, size in sizes.items():
        text = lzma.decompress((folder / f"{file}.txt.xz").read_bytes()).decode()
        (tmp_path / f"{file}.txt").write_text(text[:size])
    prepare_text(
        [f"train={tmp_path}/train.txt", f"validation={tmp_path}/valid.txt"],
        Settings(out=tmp_path / "out"),
        TextSettings(vocab=512, block=64),
    )
    fields = {"updates": 80, "eval_every": 80, "optim.warmup_updates": 20}
    fields |= {"data.source": str(tmp_path / "out"), "data.eval_examples": 128}
    fields |= {"model.d_model": 64, "model.d_ff": 256, "mesh.data": 1}
    config = load_config("lm:wikitext2,tiny", fields)
    unigram = build(config).metadata["data"]["unigram_nats"]
    summary = run_train(config, tmp_path / "run")
    assert 4 < unigram < math.log(512)
    assert summary["final"]["loss"] < unigram - 0.2
