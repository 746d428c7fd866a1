import numpy as np

from echo_jax.data.evaluation import eval_batches, sample_indices


def decode(record: bytes) -> dict[str, np.ndarray]:
    return {"x": np.frombuffer(record, np.uint8), "label": np.asarray(record[0])}


def test_last_batch_is_padded_and_masked():
    source = [bytes([i, i + 100]) for i in range(5)]
    batches = eval_batches(source, decode, batch_size=2)
    assert [batch["mask"].tolist() for batch in batches] == [[1, 1], [1, 1], [1, 0]]
    assert batches[2]["x"].tolist() == [[4, 104], [0, 0]]
    assert batches[2]["label"].tolist() == [4, 0]
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
