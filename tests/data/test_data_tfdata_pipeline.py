"""Both engines run the same pipeline: the same batches, in the same order.

One module for what loads TensorFlow, because importing it takes ten seconds.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_data_check_finite import make as make_bad

from echo_jax.config import load_config
from echo_jax.config.check import check_config
from echo_jax.data.images.decode import random_resized_crop, resize_center_crop
from echo_jax.data.pipeline.dataset import PipelineSpec, fresh_batches, train_dataset
from echo_jax.data.pipeline.stages import Stages
from echo_jax.data.pipeline.storage import SimulatedStorage
from echo_jax.data.sources.shapes import ShapeRecords, augment_shape, decode_shape
from echo_jax.echo.finite import BadItemError
from echo_jax.echo.load_schedule import LoadSchedule
from echo_jax.echo.spec import AdaptiveSpec, EchoSpec, StochasticSpec
from echo_jax.files.json_files import read_line
from echo_jax.runs import Interrupted, run_train
from echo_jax.training.records.run_log import RunLog

BATCH_SIZE, TAGS = 4, ("fresh_index", "repeat")
ENGINES = ("grain", "tfdata")
PLACEMENTS = ("read", "decode", "augment", "batch")
ORDERS = {
    "identity": EchoSpec(),
    "consecutive": EchoSpec(factor=2.5),
    "shuffle": EchoSpec(factor=2.5, order="shuffle", buffer=12),
    "spread": EchoSpec(factor=2.5, order="spread", buffer=12),
    "shuffle_buffer": EchoSpec(factor=2.5, order="shuffle_buffer", buffer=12),
    # Decisions are repeated, so that timing does not show.
    "adaptive": AdaptiveSpec(cap=3, buffer=12, replay=[True, False, False, True] * 40),
    "stochastic": StochasticSpec(LoadSchedule(start=0.5, end=0.5), buffer=12),
}
RECORDS = ShapeRecords(30, seed=0)
STAGES = Stages(RECORDS, decode_shape, augment_shape)


def dataset(engine, spec, after="decode", stages=STAGES, **fields):
    fields = {"seed": 3, "threads": 2, "prefetch": 2, **fields}
    return train_dataset(
        stages, PipelineSpec(after, BATCH_SIZE, engine=engine, **fields), spec
    )


def take(batches, count):
    with closing(iter(batches)) as iterator:
        return [next(iterator) for _ in range(count)]


def assert_equal(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert (one[key].dtype, one[key].shape) == (
                other[key].dtype,
                other[key].shape,
            )
            np.testing.assert_array_equal(one[key], other[key])


# One for each placement, and each order in a graph.
RESUMED = {
    ("spread", "read"),
    ("shuffle", "decode"),
    ("spread", "augment"),
    ("consecutive", "batch"),
}
# A graph takes half a second, and `spread` has one of its kind in every placement.
SLOW = {
    *itertools.product(
        ["consecutive", "shuffle", "shuffle_buffer"], ["read", "augment"]
    ),
}


@pytest.mark.parametrize(
    ("order", "after"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case in SLOW else ())
        for case in itertools.product(ORDERS, PLACEMENTS)
    ],
)
def test_both_engines_make_the_same_batches_and_go_on_in_the_middle(order, after):
    """Past an epoch, so that two permutations of the records are compared."""
    expected = take(dataset("grain", ORDERS[order], after), 24)
    batches = dataset("tfdata", ORDERS[order], after)
    assert_resumes(batches, expected, [17] if (order, after) in RESUMED else [])


@pytest.mark.parametrize("after", ["read", "decode"])
def test_without_augmentation_too(after):
    stages = replace(STAGES, augment=None)
    spec = ORDERS["consecutive"]
    both = [take(dataset(engine, spec, after, stages), 8) for engine in ENGINES]
    assert_equal(*both)


@pytest.mark.parametrize("order", ["spread", "adaptive"])
@pytest.mark.parametrize("after", PLACEMENTS[1:])
def test_both_use_the_same_items_in_the_places_of_bad_ones(after, order):
    found = [used_of(engine, ORDERS[order], after) for engine in ENGINES]
    batches, bad = zip(*found, strict=True)
    assert_equal(*batches)
    assert bad[0] == bad[1] != []


def used_of(engine, spec, after):
    source = make_bad(after, spec, engine=engine)
    batches = take(source, 24)
    tags = (np.concatenate([b[tag] for b in batches]) for tag in TAGS)
    return batches, source.bad_items.take(*tags)


# Each makes two graphs. In the other placements stages stand below and above, too.
SLOW_ERRORS = {("spread", "read"), ("spread", "batch")}


@pytest.mark.parametrize(
    ("order", "after"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case in SLOW_ERRORS else ())
        for case in itertools.product(["identity", "spread", "stochastic"], PLACEMENTS)
    ],
)
def test_what_is_bad_and_what_writes_into_its_input_is_an_error(after, order):
    with pytest.raises(BadItemError, match=r"^fresh item \d+ \(record"):
        take(make_bad(after, ORDERS[order], engine="tfdata", max_bad=0), 24)
    stages = replace(STAGES, augment=writes)
    with pytest.raises(ValueError, match=r"^augment writes into .*read-only"):
        take(dataset("tfdata", ORDERS[order], after, stages), 1)


def writes(item, seed):
    item["image"] //= 2
    return item


def test_how_long_fresh_items_take_is_seen_outside_of_a_graph_alone():
    fields = {"threads": 0, "prefetch": 0}
    assert not hasattr(dataset("tfdata", ORDERS["spread"], **fields), "fresh_time")
    options = PipelineSpec("decode", BATCH_SIZE, engine="tfdata", **fields)
    cases = (
        (
            dataset("tfdata", StochasticSpec(LoadSchedule(), BATCH_SIZE), **fields),
            BATCH_SIZE,
        ),
        (fresh_batches(STAGES, options), 1),
    )
    for batches, per_batch in cases:
        # A tick before an element is waited for, and one after it.
        batches.fresh_time.now = itertools.count().__next__
        take(batches, 9)
        elements = 9 * per_batch - 1
        # But for two that a graph may hold.
        assert batches.fresh_time.bounds() == (
            elements / (elements + 2) * per_batch,
            2 * elements / (elements - 2) * per_batch,
        )


class Endings:
    """Records that end in zeros, and have no two lengths alike."""

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return bytes([index]) + bytes(index)


def test_records_keep_every_byte():
    def decode(record):
        return {"length": np.array(len(record)), "first": np.array(record[0])}

    stages = Stages(Endings(), decode)
    for batch in take(dataset("tfdata", ORDERS["spread"], "read", stages), 6):
        np.testing.assert_array_equal(batch["length"], batch["first"] + 1)


@pytest.mark.parametrize(("threads", "prefetch"), [(0, 0), (3, 0), (0, 2)])
def test_threads_and_prefetching_change_nothing(threads, prefetch):
    expected = take(dataset("grain", ORDERS["spread"]), 10)
    other = dataset("tfdata", ORDERS["spread"], threads=threads, prefetch=prefetch)
    assert_equal(take(other, 10), expected)


@pytest.mark.parametrize("after", ["decode", "augment"])
def test_fresh_batches_are_the_same_and_resume(after):
    made = [
        fresh_batches(STAGES, PipelineSpec(after, BATCH_SIZE, seed=3, engine=engine))
        for engine in ENGINES
    ]
    assert_resumes(made[1], take(made[0], 12), [0, 7])


def assert_resumes(batches, expected, positions):
    """Asserts what they are, and that they go on from these positions."""
    states, found = [], []
    with closing(iter(batches)) as iterator:
        for _ in expected:
            states.append(json.loads(json.dumps(iterator.get_state())))
            found.append(next(iterator))
    assert_equal(found, expected)
    for position in positions:
        with closing(iter(batches)) as iterator:
            iterator.set_state(states[position])
            assert iterator.get_state() == states[position]
            following = [next(iterator) for _ in expected[position:]]
        assert_equal(following, expected[position:])


@pytest.mark.slow
@pytest.mark.parametrize("after", PLACEMENTS)
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_resumes_in_every_placement(after, order):
    expected = take(dataset("grain", ORDERS[order], after), 20)
    assert_resumes(dataset("tfdata", ORDERS[order], after), expected, [0, 6, 13])


def test_an_iterator_can_go_back():
    batches = dataset("tfdata", ORDERS["spread"])
    with closing(iter(batches)) as iterator:
        first = [next(iterator) for _ in range(3)]
        state = iterator.get_state()
        following = [next(iterator) for _ in range(4)]
        iterator.set_state(state)
        assert_equal([next(iterator) for _ in range(4)], following)
    expected = take(dataset("grain", ORDERS["spread"]), 7)
    assert_equal([*first, *following], expected)


def test_states_of_others_are_refused():
    states = {}
    for engine in ENGINES:
        with closing(iter(dataset(engine, ORDERS["spread"]))) as iterator:
            states[engine] = iterator.get_state()
    with closing(iter(dataset("tfdata", ORDERS["shuffle"]))) as iterator:
        with pytest.raises(ValueError, match=r"none of data\.pipeline=tfdata"):
            iterator.set_state(states["grain"])
        with pytest.raises(ValueError, match="another spec"):
            iterator.set_state(states["tfdata"])


def test_a_resumed_graph_reads_only_what_is_in_use(monkeypatch):
    reads = []
    monkeypatch.setattr(
        SimulatedStorage, "wait", lambda _, index, __: reads.append(index)
    )
    batches = dataset("tfdata", ORDERS["spread"], threads=0, prefetch=0)
    with closing(iter(batches)) as iterator:
        for _ in range(40):
            next(iterator)
        state = iterator.get_state()
        reads.clear()
        iterator.set_state(state)
        next(iterator)
    # 64 fresh items have been read; the buffer holds 12, and a round fetches 8 more.
    assert min(reads) == state["plan"]["anchor"] > 30
    assert len(reads) <= 4 * 12


def test_reads_wait_beside_each_other():
    everybody_reads = threading.Barrier(3)
    waiting = iter(range(3))

    class Waiting(Endings):
        def __getitem__(self, index):
            is_sample = threading.current_thread() is threading.main_thread()
            if not is_sample and next(waiting, None) is not None:
                # With fewer threads than asked for, this would time out and raise.
                everybody_reads.wait(timeout=120)
            return super().__getitem__(index)

    stages = Stages(Waiting(), lambda record: {"x": np.array(record[0])})
    batches = take(
        dataset("tfdata", ORDERS["identity"], "decode", stages, threads=3), 3
    )
    assert len(batches) == 3
    assert next(waiting, None) is None, "fewer than three reads waited"


@pytest.mark.parametrize("after", ["read", "batch"])
def test_what_a_stage_raises_reaches_the_trainer(after):
    def decode(record):
        if record != RECORDS[0]:
            raise ValueError("a damaged record")
        return decode_shape(record)

    with pytest.raises(ValueError, match="a damaged record"):
        take(dataset("tfdata", EchoSpec(), after, replace(STAGES, decode=decode)), 2)


@pytest.mark.slow
def test_a_program_ends_although_a_graph_is_running():
    program = """
import numpy as np
from echo_jax.data.images.decode import random_resized_crop, resize_center_crop
from echo_jax.data.pipeline.dataset import PipelineSpec, train_dataset
from echo_jax.data.pipeline.stages import Stages
from echo_jax.echo.spec import EchoSpec
stages = Stages([b"ab", b"cd"], lambda record: {"x": np.array(record[0])})
pipeline = PipelineSpec("decode", 2, engine="tfdata")
running = iter(train_dataset(stages, pipeline, EchoSpec(2)))
print(next(running)["repeat"].tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    assert done.stdout == "[0, 1]\n"


def test_grain_does_not_load_tensorflow():
    program = (
        "import sys, echo_jax.data.pipeline.dataset; print('tensorflow' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"engine": "tf"}, r"data\.pipeline='tf' is unknown; use one of grain, tfdata"),
        ({"engine": "tfdata", "workers": 2}, r"data\.workers=2 needs data\.pipeline=g"),
    ],
)
def test_what_does_not_fit_is_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        PipelineSpec("decode", 4, **fields)


def test_records_that_are_no_bytes_cannot_be_echoed_as_records():
    stages = Stages([{"x": 1}], lambda record: record)
    with pytest.raises(TypeError, match=r"needs records of bytes, not dict; use .*dec"):
        dataset("tfdata", EchoSpec(2), "read", stages)


def test_an_echo_that_cannot_be_is_refused_at_once():
    with pytest.raises(ValueError, match="buffer=3 is too small"):
        dataset("tfdata", EchoSpec(4, 3, "spread"))


def tiny(**overrides):
    config = load_config(
        str(Path(__file__).parents[2] / "configs" / "shapes.py") + ":tiny",
        {
            "updates": 6,
            "batch_size": 8,
            "log_every": 1,
            "eval_every": 6,
            "checkpoint_every": 3,
            "data.train_examples": 32,
            "data.eval_examples": 8,
            "data.pipeline": "tfdata",
            "model.width": 4,
            "echo.factor": 2.0,
            "echo.order": "spread",
            "echo.after": "decode",
            "echo.buffer": 32,
            "dispatch.mode": "loop",
            "mesh.data": 1,
            "optim.warmup_updates": 0,
            **overrides,
        },
    )
    check_config(config)
    return config


def losses(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rows = [read_line(line) for line in lines]
    return [row["loss"] for row in rows if row["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["host", "device"])
def test_training_on_either_engine_and_resumed_is_the_same_to_the_bit(where, tmp_path):
    expected = None
    for name in ("grain", "tfdata"):
        config = tiny(**{"data.pipeline": name, "echo.where": where})
        run_train(config, tmp_path / name)
        found = losses(tmp_path / name)
        assert expected is None or found == expected
        expected = found
    config = tiny(**{"echo.where": where})
    stop_after(3, config, tmp_path / "cut")
    run_train(config, tmp_path / "cut")
    assert losses(tmp_path / "cut") == expected


def stop_after(updates, config, workdir):
    """Trains until a signal comes while the update is logged."""
    add = RunLog.add

    def stop(self, row):
        add(self, row)
        if row["kind"] == "train" and row["updates"] == updates:
            signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(RunLog, "add", stop)
        run_train(config, workdir)


@pytest.mark.skipif("ECHO_JAX_DATA" not in os.environ, reason="ECHO_JAX_DATA is unset")
def test_real_photographs_come_out_the_same():
    path = Path(os.environ["ECHO_JAX_DATA"]) / "imagenet_sample" / "images.tar"
    with tarfile.open(path) as tar:
        members = [member for member in tar if member.isfile()][:8]
        photographs = [tar.extractfile(member).read() for member in members]

    stages = Stages(
        photographs,
        lambda data: {"image": resize_center_crop(data, 64, resize=64)},
        lambda item, seed: {"image": random_resized_crop(item["image"], seed, 32)},
    )
    spec = ORDERS["consecutive"]
    both = [take(dataset(engine, spec, "read", stages), 5) for engine in ENGINES]
    assert both[0][0]["image"].shape == (BATCH_SIZE, 32, 32, 3)
    assert_equal(*both)
