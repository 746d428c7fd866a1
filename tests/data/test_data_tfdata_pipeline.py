"""Both engines run the same pipeline: the same batches, in the same order.

One module for what loads TensorFlow, because importing it takes ten seconds.
"""

import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from test_data_pipeline import (
    BATCH_SIZE,
    ECHOES,
    STAGES,
    Records,
    assert_equal,
    assert_resumes,
    assert_shards_are_the_whole_stream,
    make,
    make_bad,
    take,
    writes,
)

import echo_jax as ej
from echo_jax.data.pipeline import PipelineSpec, Stages, fresh_batches


def tfdata(spec=ECHOES["spread"], after="decode", stages=STAGES, **fields):
    fields = {"threads": 2, "prefetch": 2, **fields}
    return make(spec, after, stages, engine="tfdata", **fields)


# A graph takes half a second: each placement.
@pytest.mark.parametrize(
    ("order", "after", "threads"),
    [("spread", "read", 2), ("shuffle_buffer", "augment", 2), ("spread", "batch", 0)],
)
def test_both_engines_make_the_same_batches_and_go_on_in_the_middle(
    order, after, threads
):
    """Past an epoch, so that two permutations of the records are compared."""
    spec = ECHOES[order]
    expected = take(make(spec, after), 24)
    assert_resumes(tfdata(spec, after, threads=threads), [20], expected)


@pytest.mark.slow
def test_an_adaptive_echo_makes_the_same_batches():
    fields = {"spec": ECHOES["adaptive"], "after": "augment"}
    assert_equal(take(make(**fields), 24), take(make(**fields, engine="tfdata"), 24))


@pytest.mark.parametrize("after", ["read", "batch"])
def test_what_is_bad_what_writes_into_its_input_and_what_a_stage_raises(after):
    def decode(record):
        if record != bytes(2):
            raise ValueError("a damaged record")
        return STAGES.decode(record)

    spec = ECHOES["identity"]
    with pytest.raises(ej.BadItemError, match=r"^fresh item \d+ \(record"):
        take(make_bad(spec, after, engine="tfdata"), 24)
    for changes, said in (
        ({"augment": writes}, r"^augment writes into .*read-only"),
        ({"decode": decode}, "a damaged record"),
    ):
        with pytest.raises(ValueError, match=said):
            take(tfdata(spec, after, replace(STAGES, **changes)), 2)


class Endings(Records):
    """Records that end in zeros, and have no two lengths alike."""

    def __getitem__(self, index):
        return bytes([index]) + bytes(index)


def test_records_keep_every_byte():
    def decode(record):
        return {"length": np.array(len(record)), "first": np.array(record[0])}

    for batch in take(tfdata(after="read", stages=Stages(Endings(9), decode)), 6):
        np.testing.assert_array_equal(batch["length"], batch["first"] + 1)


def test_fresh_batches_and_shards_are_the_same():
    grain, other = (
        fresh_batches(
            STAGES, PipelineSpec("augment", BATCH_SIZE, seed=3, engine=engine)
        )
        for engine in ("grain", "tfdata")
    )
    assert_resumes(other, [8], take(grain, 12))
    assert_shards_are_the_whole_stream("decode", 2, engine="tfdata")


def test_states_of_others_are_refused():
    with closing(iter(make(ECHOES["spread"]))) as iterator:
        state = iterator.get_state()
    said = pytest.raises(ValueError, match=r"none of data\.pipeline=tfdata")
    with closing(iter(tfdata())) as iterator, said:
        iterator.set_state(state)


def test_a_resumed_graph_reads_only_what_is_in_use():
    source = Records()
    batches = tfdata(stages=replace(STAGES, source=source), threads=0, prefetch=0)
    with closing(iter(batches)) as iterator:
        for _ in range(40):
            next(iterator)
        state, num_reads = iterator.get_state(), len(source.read)
        iterator.set_state(state)
        next(iterator)
    # 64 fresh items have been read; the buffer holds 12, and a round fetches 8 more.
    assert state["plan"]["anchor"] > 30
    assert len(source.read) - num_reads <= 4 * 12 < num_reads


@pytest.mark.slow
def test_a_program_ends_although_a_graph_is_running():
    program = """
import sys
import numpy as np
from echo_jax import EchoSpec
from echo_jax.data.pipeline import PipelineSpec, Stages, train_dataset
stages = Stages([b"ab", b"cd"], lambda record: {"x": np.array(record[0])})
for engine in ("grain", "tfdata"):
    pipeline = PipelineSpec("decode", 2, engine=engine)
    running = iter(train_dataset(stages, pipeline, EchoSpec(2)))
    print(next(running)["repeat"].tolist(), "tensorflow" in sys.modules)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    # Grain alone does not load TensorFlow.
    assert done.stdout == "[0, 1] False\n[0, 1] True\n", done.stderr
