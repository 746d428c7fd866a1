"""Language modelling on documents: packed, judged exactly, and from every source."""

import functools
import itertools
import lzma
import math
import os
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest
from text_folders import Documents, prepare

import echo_jax as ej
from echo_jax.config import load_config
from echo_jax.data.prepare.job import Settings
from echo_jax.data.prepare.text import TextSettings, prepare_text
from echo_jax.echo.spec import EchoSpec
from echo_jax.models.transformer import Transformer
from echo_jax.runs import run_study, run_train
from echo_jax.training.evaluation import evaluate
from echo_jax.training.trainer import compile_functions
from echo_jax.workloads import build
from echo_jax.workloads.lm import LanguageModel

CONFIGS = Path(__file__).parents[2] / "configs"
EOD, SEQ_LEN = 10, 12

SMALL = {
    "model.seq_len": 8,
    "model.d_model": 8,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.d_ff": 8,
    "precision.compute": "float32",
}
RUN = {
    "updates": 4,
    "batch_size": 8,
    "log_every": 2,
    "eval_every": 4,
    "target": 0.0,
    "stop_at_target": False,
    "data.eval_examples": 0,
    "data.workers": 0,
    "echo.buffer": 32,
    "optim.warmup_updates": 1,
    "mesh.data": 1,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A prepared folder, and the folder of a dataset."""
    datasets = tmp_path_factory.mktemp("tfds")
    Documents(data_dir=datasets, file_format="array_record").download_and_prepare()
    return prepare(tmp_path_factory.mktemp("text")), datasets


@pytest.fixture
def config_of(sources, monkeypatch):
    """Makes the config of a variant, small, on small data."""
    folder, datasets = sources
    monkeypatch.setenv("TFDS_DATA_DIR", str(datasets))

    def make(variant, **overrides):
        config = load_config(f"{CONFIGS / 'lm.py'}:{variant}")
        if config.data.source.startswith("tfds:"):
            data = {"data.source": "tfds:documents", "data.tokenizer": "bytes"}
        else:
            data = {"data.source": str(folder)}
        changed = {name.replace("__", "."): v for name, v in overrides.items()}
        return load_config(
            f"{CONFIGS / 'lm.py'}:{variant}", {**RUN, **SMALL, **data, **changed}
        )

    return make


def make_task(**fields):
    sizes = {"vocab": 11, "d_model": 8, "num_layers": 2, "num_heads": 2, "d_ff": 16}
    return LanguageModel(Transformer(**sizes, max_len=SEQ_LEN), **fields)


loss = jax.jit(LanguageModel.loss, static_argnums=0)
token_losses = jax.jit(
    functools.partial(LanguageModel._token_losses, dropout_key=None), static_argnums=0
)


@pytest.fixture(scope="module")
def variables():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: rng.normal(0, 0.5, x.shape).astype(np.float32),
        jax.eval_shape(make_task().init, jax.random.key(0)),
    )


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


def test_packed_documents_are_predicted_as_if_alone(variables):
    task = make_task(eod=EOD)
    packed = token_losses(task, variables, batch_of(window(A, B, C))["tokens"])
    alone = batch_of(window(A), window(B), window(C))
    each = token_losses(task, variables, alone["tokens"])
    expected = [each[i, : len(document) + 1] for i, document in enumerate((A, B, C))]
    np.testing.assert_allclose(packed[0], np.concatenate(expected), rtol=1e-5)
    # Without segments, what stands before a document tells something.
    plain = token_losses(make_task(), variables, batch_of(window(A, B, C))["tokens"])
    assert (np.abs(plain[0, :4] - packed[0, :4]) < 1e-5).all()
    assert (np.abs(plain[0, 5:] - packed[0, 5:]) > 1e-3).all()


def test_the_mean_of_a_batch_is_the_mean_over_its_tokens(variables):
    task = make_task(eod=EOD)
    batch = batch_of(window(A, B), window(C), window(B))
    each = np.asarray(token_losses(task, variables, batch["tokens"]), np.float64)
    real = [each[i, : n - 1] for i, n in enumerate(batch["length"])]
    assert sum(map(len, real)) == (4 + 5) + 3 + 5
    losses, others, metrics = loss(task, variables, batch, jax.random.key(0))
    assert metrics == {"tokens_per_update": ((4 + 5) + 3 + 5, 1)}
    assert losses.shape == (3,) and others == {}
    assert losses.mean() == pytest.approx(np.concatenate(real).mean(), rel=1e-5)


def test_filling_counts_for_nothing(variables):
    task = make_task(eod=EOD)
    batch = {**batch_of(window(A, B), window(C)), "mask": np.ones(2, np.float32)}
    changed = {**batch, "tokens": batch["tokens"].copy()}
    for row, length in enumerate(batch["length"]):
        changed["tokens"][row, length:] = 7
    judge = jax.jit(LanguageModel.evaluate, static_argnums=0)
    total, count = judge(task, variables, batch)["loss"]
    assert count == (4 + 5) + 3
    assert judge(task, variables, changed)["loss"][0] == total
    key = jax.random.key(0)
    np.testing.assert_array_equal(
        loss(task, variables, batch, key)[0], loss(task, variables, changed, key)[0]
    )
    # The second window is filling as a whole.
    batch["mask"][1] = 0
    assert judge(task, variables, batch)["loss"][1] == 9


def test_perplexity_is_of_the_mean_and_bits_are_of_bytes():
    derived = make_task(bytes_per_token=4.0).derive({"loss": 3 * math.log(2)})
    assert derived == pytest.approx({"perplexity": 8, "bits_per_byte": 3 / 4})
    assert make_task().derive({"loss": 1e4}) == {"perplexity": math.inf}


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["lm1b", "wikitext2"])
def test_evaluation_is_exact_for_all_sizes_and_devices(config_of, variant):
    """Sums over any batches, of which the last is padded, on any devices."""
    found = set()
    for batch_size, devices in ((8, 8), (24, 1)):
        config = config_of(variant, batch_size=batch_size, mesh__data=devices)
        workload = build(config)
        compiled = compile_functions(config, workload)
        model = compiled.model(compiled.init(compiled.init_key))
        batches = list(workload.eval_batches())
        assert 0 in batches[-1]["mask"]
        found.add(round(evaluate(compiled, model, batches)["loss"], 4))
        tokens = sum(
            (batch.get("length", np.full(batch_size, 9)) - 1)[batch["mask"] > 0].sum()
            for batch in batches
        )
        counted = sum(
            float(compiled.evaluate(model, batch)[0]["loss"][1]) for batch in batches
        )
        assert counted == tokens
    assert len(found) == 1


def expected_repeats(echo, uses):
    """What the library says of the same echo of plain integers."""
    size = 1 if echo.after == "batch" else 8
    spec = EchoSpec(echo.factor, echo.buffer, echo.order, batch_size=size)
    tagged = ej.echo(itertools.count(), spec, tags=True)
    repeats = sum(
        tags.repeat > 0 for _, tags in itertools.islice(tagged, uses // 8 * size)
    )
    return repeats * (8 // size)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
@pytest.mark.parametrize(
    "variant",
    [
        "example,spread",
        "c4,batch",
        "wikitext2,example",
        "wikitext103,read",
        "gpt2,device",
        "bytes,baseline",
    ],
)
def test_every_variant_trains_and_counts(config_of, tmp_path, variant):
    config = config_of(variant, updates=8)
    summary = run_train(config, tmp_path)
    assert summary["echo"]["where"] == ("device" if "device" in variant else "host")
    assert summary["repeats"] == expected_repeats(config.echo, uses=8 * 8)
    assert summary["fresh"] == 8 * 8 - summary["repeats"]
    assert (summary["repeats"] == 0) == ("baseline" in variant)
    final, workload = summary["final"], build(config)
    assert final["perplexity"] == pytest.approx(math.exp(final["loss"]))
    per_byte = final["loss"] / math.log(2) / workload.task.bytes_per_token
    assert final["bits_per_byte"] == pytest.approx(per_byte)
    assert 2 < workload.metadata["data"]["unigram_nats"] < math.log(257)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
@pytest.mark.parametrize(
    "sweep", ["lm_batch_size", "lm_buffer", "lm_echo_factor", "lm_seconds"]
)
def test_every_sweep_trains(tmp_path, sweep):
    study = load_config(f"{CONFIGS / 'sweeps' / sweep}.py:tiny")
    with study.unlocked():
        study.base.update_from_flattened_dict({**SMALL, "updates": 6, "eval_every": 6})
        study.base.update_from_flattened_dict({"mesh.data": 1, "checkpoint_every": 0})
        study.base.update_from_flattened_dict({"optim.warmup_updates": 1})
        # What the storage adds is measured, and other tests do that.
        study.storage_ratio = 0.0
    run_study(study, tmp_path)
    for arm in study.arms:
        assert (tmp_path / arm / "summary.json").exists()


@pytest.mark.slow
def test_tf_data_makes_the_same_batches_of_documents(config_of):
    batches = {}
    for engine in ("grain", "tfdata"):
        workload = build(config_of("lm1b", data__pipeline=engine))
        spec = EchoSpec(factor=2, order="spread", buffer=32, batch_size=8)
        with closing(iter(workload.train_dataset(spec))) as iterator:
            batches[engine] = [next(iterator) for _ in range(5)]
    for one, other in zip(*batches.values(), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_array_equal(value, other[name])
            assert value.dtype == other[name].dtype


@pytest.mark.parametrize(
    ("variant", "overrides", "named"),
    [
        ("wikitext2", {"model__positions": "huge"}, "positions='huge' is unknown"),
        ("gpt2", {"model__vocab": 200}, r"model\.vocab=200 is less than the 257"),
        ("wikitext2", {"model__seq_len": 7}, r"model\.seq_len=7 does not divide"),
    ],
)
def test_what_does_not_fit_is_named(config_of, variant, overrides, named):
    with pytest.raises(ValueError, match=named):
        build(config_of(variant, **overrides))


def test_an_unknown_field_of_the_model_is_named(config_of):
    config = config_of("wikitext2")
    with config.unlocked():
        config.model.depth = 8
    with pytest.raises(ValueError, match=r"model\.depth is no field .* it has seq_len"):
        build(config)


def test_bytes_have_no_documents_to_keep_apart(config_of):
    config = config_of("wikitext2", data__source="stdlib")
    config.model.segments = True
    with pytest.raises(ValueError, match=r"model\.segments=True needs documents"):
        build(config)


def test_text_has_nothing_to_augment():
    for variant in ("before", "after", "tiny,after"):
        with pytest.raises(ValueError, match="Use 'example'"):
            load_config(f"{CONFIGS / 'lm.py'}:{variant}")


@pytest.mark.slow
@pytest.mark.skipif("ECHO_JAX_DATA" not in os.environ, reason="needs ECHO_JAX_DATA")
def test_learns_more_of_wikitext_2_than_to_count(tmp_path):
    folder = Path(os.environ["ECHO_JAX_DATA"]) / "wikitext2"
    for split, file, size in (
        ("train", "train", 3_000_000),
        ("validation", "valid", 0),
    ):
        text = lzma.decompress((folder / f"{file}.txt.xz").read_bytes()).decode()
        (tmp_path / f"{split}.txt").write_text(text[: size or None])
    prepare_text(
        [f"{split}={tmp_path / split}.txt" for split in ("train", "validation")],
        Settings(out=tmp_path / "out"),
        TextSettings(vocab=2048, block=64),
    )
    config = load_config(
        f"{CONFIGS / 'lm.py'}:wikitext2,tiny",
        {
            "data.source": str(tmp_path / "out"),
            "updates": 150,
            "eval_every": 150,
            "data.eval_examples": 256,
            "model.d_model": 64,
            "model.d_ff": 256,
            "mesh.data": 1,
        },
    )
    metadata = build(config).metadata["data"]
    summary = run_train(config, tmp_path / "run")
    assert 5 < metadata["unigram_nats"] < math.log(2048)
    assert summary["final"]["loss"] < metadata["unigram_nats"] - 0.2
