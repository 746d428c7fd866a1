import numpy as np
import pytest

from echo_jax.data.pipeline.evaluation import (
    eval_batches,
    sample_indices,
    stream_eval_batches,
)


def decode(record: bytes) -> dict[str, np.ndarray]:
    return {"x": np.frombuffer(record, np.uint8), "label": np.asarray(record[0])}


def test_last_batch_is_padded_and_masked():
    source = [bytes([i, i + 100]) for i in range(5)]
    batches = eval_batches(source, decode, batch_size=2)
    assert [batch["mask"].tolist() for batch in batches] == [[1, 1], [1, 1], [1, 0]]
    # Filled up with an example, on which a model is as well defined as on others.
    assert batches[2]["x"].tolist() == [[4, 104], [4, 104]]
    assert batches[2]["label"].tolist() == [4, 4]
    for batch in batches:
        assert batch["mask"].dtype == np.float32
        assert batch["x"].shape == (2, 2) and batch["x"].dtype == np.uint8


def test_every_example_is_there_once():
    source = [bytes([i, 0]) for i in range(100)]
    batches = eval_batches(source, decode, batch_size=8)
    labels = np.concatenate([b["label"][b["mask"] == 1] for b in batches])
    assert labels.tolist() == list(range(100))


def test_a_sample_favours_no_class_that_takes_turns():
    num_classes = 8
    indices = np.array(sample_indices(2048, 256))
    assert len(set(indices.tolist())) == 256
    assert (np.diff(indices) > 0).all() and indices.max() < 2048
    counts = np.bincount(indices % num_classes, minlength=num_classes)
    assert counts.min() > 256 / num_classes / 2


def test_sample_of_everything_is_everything():
    for max_records in (0, 10, 11):
        assert sample_indices(10, max_records) == list(range(10))


class Counting:
    """A source that knows how many records were read."""

    def __init__(self, length):
        self.length, self.reads = length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads += 1
        return bytes([index, 0])


@pytest.mark.parametrize("threads", [1, 4])
def test_a_stream_makes_the_same_batches(threads):
    source = [bytes([i, i + 100]) for i in range(29)]
    kept = eval_batches(source, decode, batch_size=4, max_examples=22)
    streamed = stream_eval_batches(
        source, decode, batch_size=4, max_examples=22, threads=threads
    )
    for ours, other in zip(streamed, kept, strict=True):
        assert ours.keys() == other.keys()
        for key in ours:
            np.testing.assert_array_equal(ours[key], other[key])


def test_a_stream_holds_a_few_batches_only():
    source = Counting(100)
    batches = stream_eval_batches(source, decode, batch_size=5)
    next(batches)
    assert source.reads <= 10
    batches.close()
    assert source.reads <= 10


def test_a_record_that_cannot_be_decoded_ends_the_stream():
    def broken(record):
        raise ValueError(f"record {record[0]} is broken")

    with pytest.raises(ValueError, match="record 0 is broken"):
        next(stream_eval_batches([b"\0"], broken, batch_size=1))
