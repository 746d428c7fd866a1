"""The recipes of docs/loaders.md and of the files that it links to, each run."""

import contextlib
import itertools
import re
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import echo_jax as ej
from echo_jax.data.sources import open_source

PAGE = Path(__file__).parents[1] / "docs/loaders.md"
SHOWN = re.findall(r"(?ms)^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"))
LINKED = {
    path.name: path.read_text(encoding="utf-8")
    for path in (PAGE.parent / "recipes").glob("*.py")
}
BLOCKS = [*SHOWN, *LINKED.values()]
EXAMPLES, BATCH_SIZE = 96, 32

# What the page calls the reader's own. Steps print what they train on.
MINE = """
import numpy as np

def example(i):
    return {"image": np.full((4, 4), i, np.float32), "label": i}

class Dataset:
    def __len__(self):
        return 96
    def __getitem__(self, i):
        if i >= 96:
            raise IndexError
        return example(i)

dataset = Dataset()
rows = np.arange(96).reshape(3, 32)
loader = [
    {"image": np.stack([example(i)["image"] for i in row]), "label": row}
    for row in rows
]
pairs = [(batch["image"].reshape(32, 16), batch["label"][:, None]) for batch in loader]

def train_step(batch):
    assert type(batch["image"]) is np.ndarray and batch["image"].dtype == np.float32
    assert batch["label"].dtype == np.int64
    assert (batch["image"] == batch["label"][:, None, None]).all()
    print("update", *batch["label"].tolist())
"""
MODEL = """
import keras
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.0), "mse")
"""


def run(block, folder, *, mine="", also=""):
    """Runs a block and returns what it printed, and how it warned."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(MINE + mine)
    (folder / "recipe.py").write_text(block + also)
    done = subprocess.run(
        [sys.executable, "recipe.py"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def block_with(word):
    (block,) = (block for block in BLOCKS if word in block)
    return block


def uses(stdout):
    """How often each example was trained on, and the sizes of the batches."""
    batches = re.findall("(?m)^update (.*)$", stdout)
    labels = [list(map(int, batch.split())) for batch in batches]
    return Counter(label for batch in labels for label in batch), [*map(len, labels)]


def test_every_block_of_the_page_and_every_recipe_is_run():
    assert len(SHOWN) == 5
    words = ("import loader", "batch_size=32)\nspec", "forkserver", "KERAS_BACKEND")
    words += ("StatefulDataLoader", "class Photographs", "class Echoed")
    words += ("batched_dataloader", "local_iterator", "prefetch_to_device")
    assert {block_with(word) for word in words} == set(BLOCKS)
    # dataloader.py is the first block of the page with another loader.
    for name in LINKED.keys() - {"dataloader.py"}:
        assert f"(recipes/{name})" in PAGE.read_text(encoding="utf-8")


READ_ALL = """
from mine import rows

batches = Echoed(
    data_source=[{"label": i} for i in rows.ravel()],
    shuffle=True, seed=0, num_epochs=1, batch_size=32, num_workers=0,
)
for batch in batches:
    print("update", *batch["label"].tolist())
"""


@pytest.mark.parametrize(
    ("word", "package", "also"),
    [
        ("import loader", "numpy", ""),
        ("batch_size=32)\nspec", "torch", ""),
        ("class Echoed", "kauldron", READ_ALL),
    ],
)
def test_every_example_is_used_four_times(word, package, also, tmp_path):
    pytest.importorskip(package, reason=f"{package} is not installed")
    counted, sizes = uses(run(block_with(word), tmp_path, also=also)[0])
    assert counted == dict.fromkeys(range(EXAMPLES), 4)
    assert sizes == [BATCH_SIZE] * 12


@pytest.mark.slow
def test_workers_of_torch_beside_jax(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed: docs/loaders.md")
    block = "import jax\njax.numpy.zeros(1)\n" + block_with("forkserver")
    stdout, stderr = run(block, tmp_path)
    counted, _ = uses(stdout)
    assert counted.keys() == set(range(EXAMPLES))
    assert 1 <= min(counted.values()) <= max(counted.values()) <= 8
    assert "fork" not in stderr


@pytest.mark.slow
def test_keras_makes_an_update_of_every_echoed_batch(tmp_path):
    pytest.importorskip("keras", reason="keras is not installed")
    also = "print('updates', int(model.optimizer.iterations))"
    stdout, _ = run(block_with("KERAS_BACKEND"), tmp_path, mine=MODEL, also=also)
    assert "updates 120\n" in stdout


def run_here(block, monkeypatch, names, **mine):
    """Runs a block in this process, with what is the reader's own, and fills names."""
    module = types.ModuleType("mine")
    vars(module).update(mine)
    monkeypatch.setitem(sys.modules, "mine", module)
    exec(compile(block, str(PAGE), "exec"), names)


class Labels:
    """A source for Grain and torch; its DataLoader needs a constant ``repr``."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, i):
        return {"label": np.int64(i)}

    def __repr__(self):
        return "Labels()"


def grains_data_loader():
    sampler = grain.samplers.IndexSampler(
        EXAMPLES, grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=1
    )
    batch = grain.transforms.Batch(BATCH_SIZE, drop_remainder=True)
    return grain.DataLoader(data_source=Labels(), sampler=sampler, operations=[batch])


def grains_dataset():
    return grain.MapDataset.source(Labels()).shuffle(1).to_iter_dataset().batch(32)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata 0.11
@pytest.mark.parametrize(
    ("word", "name", "make", "num_uses", "killed", "saved"),
    [
        ("batched_dataloader", "batched_dataloader", grains_data_loader, 4, 7, 5),
        ("local_iterator", "dataset", grains_dataset, 4, 7, 5),
        ("StatefulDataLoader", "dataset", Labels, 12, 15, 10),
    ],
)
def test_a_killed_recipe_goes_on_to_the_bit(
    word, name, make, num_uses, killed, saved, tmp_path, monkeypatch
):
    def updates(folder, stop_after=0, seed=0):
        def train_step(batch):
            found.append(batch["label"].tolist())
            if len(found) == stop_after:
                raise InterruptedError

        found, names, folder = [], {}, tmp_path / folder
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        if make is Labels:
            torch.manual_seed(seed)
        mine = {"train_step": train_step, "workdir": folder, name: make()}
        with contextlib.suppress(InterruptedError):
            run_here(block_with(word), monkeypatch, names, **mine)
        if "manager" in names:
            names["manager"].close()  # MaxText's form saves in a thread.
        return found

    if make is Labels:
        pytest.importorskip("torchdata", reason="torchdata is not installed")
        torch = pytest.importorskip("torch")
    expected = updates("whole")
    counted = Counter(itertools.chain(*expected))
    assert counted == dict.fromkeys(range(EXAMPLES), num_uses)
    assert updates("killed", killed) == expected[:killed]
    # The order is that of the state, not that of the seed.
    assert updates("killed", seed=1) == expected[saved:]


def test_a_trainer_with_pmap_echoes_before_its_batches_are_split(monkeypatch):
    def train_step(batch):
        assert batch["label"].shape == (4, 8)
        assert [*batch["label"].devices()] and len(batch["label"].devices()) == 4
        totals.append(sums(batch["label"]).tolist())
        found.extend(np.asarray(batch["label"]).ravel().tolist())

    sums, found, totals = jax.pmap(jnp.sum, devices=jax.devices()[:4]), [], []
    loader = [{"label": row} for row in np.arange(96, dtype=np.int32).reshape(3, 32)]
    mine = {"devices": jax.devices()[:4], "loader": loader, "train_step": train_step}
    run_here(block_with("prefetch_to_device"), monkeypatch, {}, **mine)
    assert Counter(found) == dict.fromkeys(range(96), 4)
    assert np.ravel(totals).tolist() == np.reshape(found, (-1, 8)).sum(1).tolist()


def test_a_class_of_ones_own_is_a_source(tmp_path, monkeypatch):
    mine = types.ModuleType("mine")
    mine.my_paths = lambda split: sorted((tmp_path / split).rglob("*.png"))
    monkeypatch.setitem(sys.modules, "mine", mine)
    (tmp_path / "photographs.py").write_text(block_with("class Photographs"))
    for name in ("train/cat/1.png", "train/dog/2.png", "validation/dog/3.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    monkeypatch.syspath_prepend(tmp_path)
    records, decode = open_source("python:photographs:Photographs", "train", "images")
    assert records.info["classes"] == ["cat", "dog"]
    assert [decode(records[i]) for i in range(len(records))] == [
        {"image": b"train/cat/1.png", "label": 0, "name": "1.png"},
        {"image": b"train/dog/2.png", "label": 1, "name": "2.png"},
    ]


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


SPEC = ej.EchoSpec(factor=2, order="spread", buffer=16, batch_size=8)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x.bfloat16(), "BFloat16"),
        (lambda x: x.requires_grad_(), "requires grad"),
        (lambda x: x.to("meta"), "meta device"),
    ],
)
def test_tensors_without_an_array_are_refused(torch, change, reason):
    stream = [{"x": change(torch.zeros(8, 2))}]
    for echo in (
        ej.echo(stream, SPEC, batch=True),
        ej.echo_batches(stream, SPEC),
        ej.device.echo_batches(stream, SPEC, prefetch=0),
    ):
        with pytest.raises(
            ValueError, match=r"leaf item\['x'\] is a torch\."
        ) as caught:
            next(echo)
        assert reason in str(caught.value)


def test_an_item_keeps_its_tensors_and_a_use_has_its_own(torch):
    first, second = ej.echo([{"x": torch.zeros(2)}], ej.EchoSpec(2))
    first["x"][:] = 1
    assert second["x"].tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata 0.11
@pytest.mark.parametrize(
    ("make_echo", "workers"),
    [
        (ej.device.echo_batches, 0),
        pytest.param(ej.echo_batches, 2, marks=pytest.mark.slow),
    ],
)
def test_the_echo_of_a_stateful_loader_resumes_to_the_bit(torch, make_echo, workers):
    stateful = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed"
    )

    def make(seed):
        sampler = stateful.sampler.RandomSampler(
            Labels(), generator=torch.Generator().manual_seed(seed)
        )
        context = {"multiprocessing_context": "forkserver"} if workers else {}
        loader = stateful.StatefulDataLoader(
            Labels(), batch_size=8, sampler=sampler, num_workers=workers, **context
        )
        spec = ej.EchoSpec(factor=3, order="spread", buffer=96, batch_size=16)
        return make_echo(loader, spec)

    def labels(echo):
        return [np.asarray(batch["label"]).tolist() for batch in echo]

    expected = labels(make(0))
    assert len(expected) == 18
    for taken in (7,) if workers else range(len(expected) + 1):
        echo = make(0)
        assert labels(itertools.islice(echo, taken)) == expected[:taken]
        other = make(1)
        other.set_state(echo.get_state())
        assert labels(other) == expected[taken:]
