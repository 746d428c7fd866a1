"""Examples are true: the Python blocks of README.md and docs, and those in docstrings.

What a page calls the reader's own is a stand-in here. `test_loaders` runs the blocks of
docs/loaders.md. Lines of the shell are parsed by `test_documents`.
"""

import doctest
import importlib
import re
import time
from contextlib import closing
from pathlib import Path

import grain
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import echo_jax as ej
from echo_jax.config import load_config
from echo_jax.data.augment import Augment, Flip

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/site/*.md")]
# `test_loaders` says how many it has.
PAGES.remove(ROOT / "docs/loaders.md")
BLOCKS = {
    page.relative_to(ROOT).as_posix(): re.findall(
        r"(?ms)^```(?:python|diff)\n(.*?)^```", page.read_text(encoding="utf-8")
    )
    for page in PAGES
}
# A word for each block, in the order of the page; each is run by a test below.
WORDS = {
    "README.md": ("for batch in", "ej.probe", "AdaptiveSpec"),
    "docs/in-your-trainer.md": ("ej.probe", "replay", "make_my"),
    "docs/on-accelerator.md": ("PadCrop", "model", "count()", "StepEcho"),
    "docs/generated-data.md": ("MapDataset", "solver.next_batch"),
    "docs/scaling.md": ("gradient_noise_scale",),
    "docs/site/index.md": ("ej.probe",),
}
IMAGES, BATCH_SIZE = 512, 32
# The one line that loads TensorFlow, which takes ten seconds.
TF_LINE = "tf_ds = tf_dataset.apply(ej.tfdata.echo(ej.EchoSpec(factor=2)))\n"


class Loader:
    """A loader of the reader's, of batches of images, that has a state."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at >= IMAGES:
            raise StopIteration
        self.at += BATCH_SIZE
        labels = np.arange(self.at - BATCH_SIZE, self.at)
        return {"image": np.zeros((BATCH_SIZE, 8, 8, 3), np.uint8), "label": labels}

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


class Uses:
    """How often each example was trained on, by steps of the reader's."""

    def __init__(self):
        self.batches = []

    def __call__(self, batch):
        self.batches.append(np.asarray(batch["label"]))
        return np.zeros(())

    def step(self, params, state, batch):
        return params, state, self(batch)

    def train_step(self, state, batch):
        return self.step(0, state, batch)[1]

    def counts(self):
        return np.bincount(np.concatenate(self.batches), minlength=IMAGES)


def block_with(page, word):
    (block,) = (block for block in BLOCKS[page] if word in block)
    return block


def run(page, word, **mine):
    """Runs the block of a page that has a word in it; of a diff what it leads to."""
    assert word in WORDS[page]
    block = block_with(page, word)
    if re.search("(?m)^[-+]", block):
        block = re.sub("(?m)^.", "", re.sub("(?m)^-.*\n", "", block))
    names = {"ej": ej, "np": np, **mine}
    exec(compile(block, page, "exec"), names)
    return names


def test_every_block_is_run():
    for page, blocks in BLOCKS.items():
        run_here = [block_with(page, word) for word in WORDS.get(page, ())]
        assert run_here == blocks, page


def test_the_loop_of_the_readme():
    uses = Uses()
    mine = {"loader": Loader(), "params": 0, "state": 0, "step": uses.step}
    run("README.md", "for batch in", **mine)
    assert 1 <= uses.counts().min() <= uses.counts().max() <= 4
    assert {len(batch) for batch in uses.batches} == {BATCH_SIZE}


@pytest.mark.parametrize(
    ("name", "least", "times", "size"),
    [("steady", 4, 4, 64), ("bursty", 1, 8, 32), ("from_examples", 4, 4, 64)],
)
def test_the_calls_of_the_readme(name, least, times, size):
    uses = Uses()
    examples = ({"label": i} for i in range(IMAGES))
    names = run("README.md", "AdaptiveSpec", loader=Loader(), examples=examples)
    for batch in names[name]:
        uses(batch)
    assert least <= uses.counts().min() <= uses.counts().max() <= times
    assert max(len(batch) for batch in uses.batches) == size


@pytest.mark.parametrize(
    "page", ["README.md", "docs/in-your-trainer.md", "docs/site/index.md"]
)
def test_the_probe(page, capsys, monkeypatch):
    monkeypatch.setitem(ej.probe.__kwdefaults__, "seconds", 0.2)

    def batches():
        while True:
            yield from Loader()

    run(page, "ej.probe", loader=batches(), train_step=Uses())
    assert "Step alone" in capsys.readouterr().out


def test_an_echo_on_the_accelerator():
    uses = Uses()
    mine = {"host_batches": Loader(), "state": 0, "train_step": uses.train_step}
    names = run("docs/on-accelerator.md", "PadCrop", **mine)
    assert (uses.counts() == 4).all()
    assert isinstance(names["batch"]["image"], jax.Array)
    mine = {"host_batches": Loader(), "spec": ej.EchoSpec(2, batch_size=BATCH_SIZE)}
    mine |= {"jax": jax, "NamedSharding": NamedSharding, "PartitionSpec": PartitionSpec}
    for word in ("model", "count()"):
        names = run("docs/on-accelerator.md", word, **mine)
        first = next(names["batches"])["image"]
        assert first.sharding == names["sharding"]


def test_an_echo_in_the_readers_own_step():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 32, 3), np.uint8)
    batches = [{"image": each, "label": np.arange(32) % 10} for each in pixels]
    augment = Augment((Flip(),))
    names = run(
        "docs/on-accelerator.md", "StepEcho", host_batches=batches, augment=augment
    )
    assert (np.bincount(names["tags"].fresh_index.ravel()) == 4).all()
    assert names["update"]._cache_size() == 1 and names["loss"] < np.log(10)


def test_an_echo_is_saved_and_replayed():
    uses = Uses()
    spec = ej.AdaptiveSpec(max_uses=3, buffer=256, batch_size=32)
    mine = {"loader": Loader(), "spec": spec, "state": 0}
    names = run("docs/in-your-trainer.md", "replay", train_step=uses.train_step, **mine)
    assert set(uses.counts()) <= {1, 2, 3}
    with ej.echo_batches(Loader(), spec, prefetch=2) as ended:
        ended.set_state(names["checkpoint"])
        assert next(ended, None) is None
    assert names["spec"].replay == names["batches"].log


@pytest.mark.parametrize(
    "with_tensorflow", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_echoes_of_others_tags_and_laws(with_tensorflow, monkeypatch):
    page = "docs/in-your-trainer.md"
    assert any(TF_LINE in block for block in BLOCKS[page])
    mine = {
        "grain_iter_dataset": grain.MapDataset.range(9).to_iter_dataset(),
        "items": range(9),
        "spec": ej.EchoSpec(factor=2),
        "seed": 0,
        "make_my_echo": lambda upstream, spec: ej.echo(upstream, spec, tags=True),
        "make_my_device_echo": lambda batches, spec, augment: ej.device.echo_batches(
            batches, spec, augment=augment, tags=True
        ),
    }
    if with_tensorflow:
        import tensorflow as tf

        mine["tf_dataset"] = tf.data.Dataset.range(9)
    else:
        without = [each.replace(TF_LINE, "") for each in BLOCKS[page]]
        monkeypatch.setitem(BLOCKS, page, without)
    names = run(page, "make_my", **mine)
    twice = np.repeat(np.arange(9), 2).tolist()
    assert [*names["ds"]] == twice
    assert names["tags"] == ej.UseInfo(8, 1)
    if with_tensorflow:
        assert [*map(int, names["tf_ds"])] == twice


def test_the_noise_scale(capsys):
    names = run("docs/scaling.md", "gradient_noise_scale")
    # Of -2x(x·1 + e): |G|² = 16, E|g|² = 4 (4 * 6 + 4) = 112, so tr(Σ) = 96.
    assert tuple(names["mean"]) == pytest.approx((16, 96), rel=0.1)
    (found,) = re.findall(r"a noise scale of (.*) examples", capsys.readouterr().out)
    # The page says why it is 6.
    assert float(found) == pytest.approx(6, rel=0.1)


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.glob("echo_jax/**/*.py")
    if ">>> " in path.read_text(encoding="utf-8")
}
# Their examples name files, runs or devices of the reader.
SHOWN = {
    f"echo_jax.{name}"
    for name in (
        "data.prepare.coco",
        *("data.prepare.images", "data.prepare.text", "data.sources.prepared"),
        *("data.sources.source", "inference.evaluate", "inference.export"),
        *("inference.run", "runs", "studies.table", "training.loop"),
    )
}
# Whole networks, run one operation at a time.
SLOW = {f"echo_jax.models.{name}" for name in ("mobilenet", "resnet", "transformer")}
# What a reader of an example is expected to have imported.
NAMES = {
    **{"Path": Path, "closing": closing, "jax": jax, "jnp": jax.numpy, "np": np},
    "load_config": load_config,
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in sorted(MODULES - SHOWN)
    ],
)
def test_examples_are_true(name, monkeypatch, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    # By its full name: an attribute of its package may hide it, as a function does.
    module = importlib.import_module(name)
    tests = doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=NAMES)
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.tries > 0
    assert runner.failures == 0, [test.name for test in tests]


class Solver:
    """A solver of the reader's, which is slow at its third batch."""

    def __init__(self):
        self.batches = iter(range(0, IMAGES, BATCH_SIZE))

    def next_batch(self):
        first = next(self.batches, None)
        time.sleep(0.2 * (first == 2 * BATCH_SIZE))
        return first if first is None else {"label": np.arange(first, first + 32)}


def test_data_that_is_made():
    page, seen = "docs/generated-data.md", []
    run(page, "MapDataset", num_examples=64, train_step=lambda x: seen.append(x["y"]))
    fields, counts = np.unique(np.concatenate(seen), axis=0, return_counts=True)
    assert len(fields) == 64 and {*counts} == {4}
    uses = Uses()
    names = run(page, "solver.next_batch", solver=Solver(), train_step=uses)
    assert 1 <= uses.counts().min() <= uses.counts().max() <= 8
    assert names["batches"].stats()["uses_per_fresh"] == uses.counts().mean()
