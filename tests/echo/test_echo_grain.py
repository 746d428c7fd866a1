"""The Grain stage is a good citizen of Grain."""

import grain
import numpy as np
import pytest
from echo_cases import ORDERS, grain_source, spec_of

import echo_jax as ej


@pytest.fixture(params=ORDERS)
def spec(request):
    return spec_of(request.param, "1.5")


def _source(num_items=13):
    dataset = grain.MapDataset.range(num_items).shuffle(seed=3).repeat(2)
    return grain_source(dataset)


@pytest.mark.parametrize("options", [{}, {"batch": True, "tags": True}])
def test_grains_own_check_of_checkpoints(spec, options):
    dataset = ej.grain.echo(_source(9), spec, **options)
    grain.experimental.assert_equal_output_after_checkpoint(dataset)


def test_grains_own_check_of_checkpoints_of_echoed_batches(spec):
    dataset = _source().map(lambda k: {"index": np.array(k)}).batch(3)
    dataset = ej.grain.echo_batches(dataset, spec, tags=True)
    grain.experimental.assert_equal_output_after_checkpoint(dataset)


def test_grains_own_check_of_checkpoints_before_a_prefetch(spec):
    dataset = ej.grain.echo(_source(5), spec)
    dataset = grain.experimental.ThreadPrefetchIterDataset(
        dataset, prefetch_buffer_size=3
    )
    grain.experimental.assert_equal_output_after_checkpoint(dataset)


def test_grains_own_check_of_checkpoints_of_a_whole_pipeline():
    """An augmentation before the echo, another one and batches after it."""

    def jitter(item, rng):
        return item + rng.normal()

    dataset = grain_source(np.arange(11.0)).random_map(jitter, seed=1)
    dataset = ej.grain.echo(dataset, spec_of("spread", "1.5"))
    dataset = dataset.random_map(jitter, seed=2).batch(4)
    grain.experimental.assert_equal_output_after_checkpoint(dataset)


def test_elements_that_follow_see_the_items(spec):
    dataset = ej.grain.echo(_source(), spec).map(lambda k: -k).filter(lambda k: k < -6)
    out = list(dataset)
    assert set(out) == set(range(-12, -6))


def test_iterators_of_one_dataset_are_independent(spec):
    dataset = ej.grain.echo(_source(), spec)
    one, two = iter(dataset), iter(dataset)
    pairs = list(zip(one, two, strict=True))
    assert [a for a, _ in pairs] == [b for _, b in pairs] == list(dataset)


def test_an_epoch_more_is_fresh_again():
    dataset = ej.grain.echo(_source(), ej.EchoSpec(2), tags=True)
    tags = [tags for _, tags in dataset]
    assert [t.fresh_index for t in tags] == [k for k in range(26) for _ in (0, 1)]


def test_a_dataset_with_random_access_is_refused():
    with pytest.raises(TypeError) as caught:
        ej.grain.echo(grain.MapDataset.range(3), ej.EchoSpec(2))
    message = str(caught.value)
    assert "not a RangeMapDataset" in message
    assert "call to_iter_dataset() first" in message


def test_a_spec_that_cannot_be_carried_out_is_refused_at_the_call():
    with pytest.raises(ValueError, match="buffer=3 is too small for order='spread'"):
        ej.grain.echo(_source(), ej.EchoSpec(4, 3, "spread", 8))
