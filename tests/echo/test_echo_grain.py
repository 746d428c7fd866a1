"""The Grain stage is a good citizen of Grain."""

import gc

import grain
import grain.python as pygrain
import numpy as np
import pytest
from echo_cases import MODES, grain_source, spec_of
from etils import epath

import echo_jax as ej


def _source(num_items=13):
    dataset = grain.MapDataset.range(num_items).shuffle(seed=3).repeat(2)
    return grain_source(dataset)


@pytest.mark.parametrize("options", [{}, {"batch": True, "tags": True}])
def test_grains_own_check_of_checkpoints(options):
    dataset = ej.grain.echo(_source(4), spec_of("window_shuffle", "1.5"), **options)
    grain.experimental.assert_equal_output_after_checkpoint(dataset)


def test_grains_own_check_of_echoed_batches_and_before_a_prefetch():
    spec = spec_of("spread", "1.5")
    dataset = _source(5).map(lambda k: {"index": np.array(k)}).batch(3)
    dataset = ej.grain.echo_batches(dataset, spec, tags=True)
    grain.experimental.assert_equal_output_after_checkpoint(dataset)
    dataset = grain.experimental.ThreadPrefetchIterDataset(
        ej.grain.echo(_source(3), spec), prefetch_buffer_size=3
    )
    grain.experimental.assert_equal_output_after_checkpoint(dataset)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (grain.MapDataset.range(3), "got a RangeMapDataset.* its to_iter_dataset.. fi"),
        (iter(_source()), r"Give what it was made from.*iter\(\)"),
        ([1, 2], "Use ej.echo for the loaders"),
    ],
    ids=["by_index", "iterator", "list"],
)
def test_what_is_no_dataset_is_refused_with_the_way(given, message):
    with pytest.raises(TypeError, match=message):
        ej.grain.echo(given, ej.EchoSpec(2))


def test_a_dataset_that_fails_at_its_first_batch_says_so_alone():
    dataset = grain.MapDataset.range(3).map(lambda k: k // 0).to_iter_dataset()
    with pytest.raises(ZeroDivisionError):
        iter(ej.grain.echo_batches(dataset))
    gc.collect()  # An error in its end would be a warning.


class Rows:
    """A data source that worker processes can import, with a constant ``repr``."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {"index": np.int64(index)}

    def __repr__(self):
        return "Rows()"


SHUFFLED = pygrain.IndexSampler(
    24, shard_options=pygrain.NoSharding(), shuffle=True, num_epochs=2, seed=3
)


def data_loader(num_workers=0, sampler=SHUFFLED):
    """The loader of nanodo: shuffled records, batched inside."""
    return pygrain.DataLoader(
        data_source=Rows(),
        sampler=sampler,
        operations=[pygrain.Batch(4, drop_remainder=True)],
        worker_count=num_workers,
    )


def dataset():
    """The pipeline of MaxText: a dataset with batches at its end."""
    return _source(24).map(lambda k: {"index": np.array(k)}).batch(4)


def echo_of(loader, spec):
    return iter(ej.grain.echo_batches(loader, spec, tags=True))


def bits(output):
    batch, tags = output
    return batch["index"].tolist(), *(column.tolist() for column in tags)


HANDLERS = {
    "PyGrainCheckpointHandler": [
        getattr(pygrain, f"PyGrainCheckpoint{part}")
        for part in ("Handler", "Save", "Restore")
    ],
    "grain.checkpoint": [
        getattr(grain.checkpoint, f"Checkpoint{part}")
        for part in ("Handler", "Save", "Restore")
    ],
}
FIXED = ej.EchoSpec(2.5, 16, "spread", 8)


def check_checkpoints(make, spec, names, folder, positions):
    """Saves an echo after some outputs, and compares what follows in another one."""
    handler, save, restore = HANDLERS[names]
    handler, folder = handler(), epath.Path(folder)
    with echo_of(make(), spec) as whole:
        expected = [bits(output) for output in whole]
    assert len(expected) > 6
    for position in positions:
        at = folder / str(position)
        at.mkdir()
        with echo_of(make(), spec) as echo, echo_of(make(), spec) as other:
            for _ in range(position):
                next(echo)
            handler.save(at, args=save(echo))
            # The state is that of the save, wherever the echo is by now.
            found = handler.restore(at, args=restore(other))
            assert found is other
            assert [bits(output) for output in other] == expected[position:]


@pytest.mark.parametrize(
    ("names", "make", "spec"),
    [
        ("PyGrainCheckpointHandler", data_loader, FIXED),
        ("grain.checkpoint", data_loader, MODES["stochastic"]),
        ("grain.checkpoint", dataset, FIXED),
    ],
)
def test_grains_checkpoint_handlers_go_on_to_the_bit(names, make, spec, tmp_path):
    check_checkpoints(make, spec, names, tmp_path, [5])


@pytest.mark.slow
def test_a_data_loader_with_workers_goes_on_to_the_bit(tmp_path):
    names = "PyGrainCheckpointHandler"
    check_checkpoints(lambda: data_loader(2), FIXED, names, tmp_path, [0, 5])


class Started(grain.DatasetIterator):
    """Counts up, and how often it was told to read ahead."""

    def __init__(self):
        super().__init__()
        self.items, self.started = iter(range(9)), 0

    def __next__(self):
        return next(self.items)

    def get_state(self):
        return {}

    def set_state(self, state):
        pass

    def start_prefetch(self):
        self.started += 1


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_start_of_prefetch_leaves_one_thread_to_the_upstream(prefetch):
    class Source(grain.IterDataset):
        def __iter__(self):
            return upstream

    upstream = Started()
    with iter(ej.grain.echo(Source(), ej.EchoSpec(2), prefetch=prefetch)) as echo:
        assert [next(echo), next(echo)] == [0, 0]
        echo.start_prefetch()
        assert upstream.started == (not prefetch)
        assert [*echo] == [k for k in range(1, 9) for _ in range(2)]
