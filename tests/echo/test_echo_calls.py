"""The public calls of an echo: what each takes, refuses and warns of."""

import operator
import time
from dataclasses import replace

import grain
import jax.numpy as jnp
import numpy as np
import pytest

import echo_jax as ej
from echo_jax.echo.laws import CountingUpstream

BATCHES = [{"image": np.zeros((4, 3)), "label": np.arange(4)} for _ in range(3)]


def test_items_that_are_batches_are_told_the_other_call_once():
    echo = ej.echo(BATCHES, ej.EchoSpec(2, batch_size=2), batch=True)
    with pytest.warns(UserWarning, match=r"first axis 4 .* use ej\.echo_batches"):
        next(echo)
    assert len([*echo]) == 2


@pytest.mark.parametrize(
    "item",
    [
        {"image": np.zeros((4, 3)), "label": np.int32(1)},  # a scalar
        {"image": np.zeros((4, 3)), "label": np.zeros(3)},  # other rows
        {"image": np.zeros((1, 3)), "label": np.zeros(1)},  # one row
        {"tokens": np.zeros(4), "targets": np.zeros(4)},  # sequences
    ],
)
def test_items_that_are_no_batches_are_told_nothing(item):
    assert [*ej.echo([item] * 2, ej.EchoSpec(2, batch_size=2), batch=True)]


WITHOUT_A_SPEC = [ej.echo_batches, ej.device.echo_batches]


@pytest.mark.parametrize("make", WITHOUT_A_SPEC)
def test_an_echo_without_a_spec_is_a_safe_adaptive_one(make, caplog):
    lanes = {"num_lanes": 8} if make is ej.device.echo_batches else {}
    rows = 8 if lanes else 4
    loader = [{"x": np.arange(rows * k, rows * (k + 1))} for k in range(9)]
    with caplog.at_level("INFO", logger="echo_jax"):
        with make(loader, **lanes) as batches:
            outputs = [np.asarray(batch["x"]) for batch in batches]
        log = batches.log
    assert {len(x) for x in outputs} == {rows}
    uses = np.bincount(np.concatenate(outputs))
    assert uses.size == 9 * rows and {*uses} <= {1, 2, 3, 4}
    (record,) = caplog.records
    assert f"max_uses=4, buffer={64 * rows}, batch_size={rows}" in record.getMessage()
    spec = ej.AdaptiveSpec(max_uses=4, buffer=64 * rows, batch_size=rows, replay=log)
    same = [np.asarray(batch["x"]) for batch in make(loader, spec, **lanes)]
    np.testing.assert_array_equal(outputs, same)


@pytest.mark.parametrize(
    ("spec", "whole"),
    [
        (ej.EchoSpec(4), ej.EchoSpec(4, 512, "spread", 8)),
        (ej.EchoSpec(4, 128, "spread"), ej.EchoSpec(4, 128, "spread", 8)),
        (ej.EchoSpec(2, batch_size=16), ej.EchoSpec(2, 1024, "spread", 16)),
        (ej.EchoSpec(2, order="consecutive"), ej.EchoSpec(2, 1, "consecutive", 8)),
        (ej.AdaptiveSpec(2, 64), ej.AdaptiveSpec(2, 64, 8)),
        (
            ej.StochasticSpec(seed=1),
            ej.StochasticSpec(buffer=512, batch_size=8, seed=1),
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "make",
    [
        ej.echo_batches,
        lambda *args: ej.device.echo_batches(*args, num_lanes=8),
        lambda loader, spec: iter(ej.grain.echo_batches(loader, spec)),
    ],
    ids=["host", "device", "grain"],
)
def test_what_a_spec_leaves_out_follows_from_the_loader(make, spec, whole):
    if isinstance(spec, ej.AdaptiveSpec):
        replay = [True] * 4 + [False, False, True, True]
        spec, whole = replace(spec, replay=replay), replace(whole, replay=replay)
    loader = grain.MapDataset.range(160).batch(8).to_iter_dataset()
    batches, due = make(loader, spec), make(loader, whole)
    first = [np.asarray(next(batches)).tolist() for _ in range(8)]
    assert first == [np.asarray(next(due)).tolist() for _ in range(8)]
    state = batches.get_state()
    assert state.pop("spec", None) in (
        None,
        {"batch_size": whole.batch_size, "buffer": whole.buffer},
    )
    again = make(loader, spec)
    again.set_state(batches.get_state())
    assert np.asarray(next(again)).tolist() == np.asarray(next(due)).tolist()
    # A single item has no batch size to take over.
    assert [*ej.echo([1, 2], ej.EchoSpec(2))] == [1, 1, 2, 2]


@pytest.mark.parametrize("make", WITHOUT_A_SPEC)
@pytest.mark.parametrize("began", [False, True])
def test_a_buffer_that_other_memory_chose_is_restored(make, began):
    lanes = {"num_lanes": 8} if make is ej.device.echo_batches else {}
    items = [{"x": np.arange(8 * k, 8 * k + 8)} for k in range(3)]
    echo = make(CountingUpstream(items), **lanes)
    next(echo)
    # What an echo saves that found memory for two batches only.
    small = ej.AdaptiveSpec(buffer=16, batch_size=8, replay=echo.log)
    other = make(CountingUpstream(items), small, **lanes)
    next(other)
    state = {**other.get_state(), "spec": {"batch_size": 8, "buffer": 16}}
    upstream = CountingUpstream(items)
    again = make(upstream, **lanes)
    if began:
        next(again)
        deadline = time.monotonic() + 30
        while upstream.reads < len(items) and time.monotonic() < deadline:
            time.sleep(0.01)  # a thread reads ahead, perhaps to the end
    again.set_state(state)
    assert len(again.log) == 1
    seen = [np.asarray(batch["x"]) for batch in again]
    assert np.bincount(np.concatenate(seen)).max() <= 4
    assert again.get_state()["spec"]["buffer"] == 16
    for damage in ({"spec": 3}, {"spec": {"batch_size": 8, "buffer": "x"}}):
        with pytest.raises(ValueError):
            make(CountingUpstream(items), **lanes).set_state({**state, **damage})


@pytest.mark.parametrize(
    "make",
    [
        lambda spec: ej.echo(iter([1, 2]), spec),
        lambda spec: ej.echo_batches(iter([{"x": np.arange(8)}]), spec),
        lambda spec: ej.device.echo_batches(iter([{"x": np.arange(8)}]), spec),
        lambda spec: iter(
            ej.grain.echo(grain.MapDataset.range(2).to_iter_dataset(), spec)
        ),
    ],
    ids=["items", "batches", "device", "grain"],
)
def test_an_echo_that_ended_says_so_once(make):
    echo = make(ej.EchoSpec(2, batch_size=8))
    assert [*echo]
    with pytest.warns(UserWarning, match=r"ended.*cannot be started again"):
        assert [*echo] == []
    assert [*echo] == []
    with pytest.warns(UserWarning, match="ended") as warned:  # and another echo
        other = make(ej.EchoSpec(2, batch_size=8))
        assert [*other] and [*other] == []
    assert len(warned) == 1


@pytest.mark.parametrize("factor", [1, 2.5, {0: 1, 3: 4}])
@pytest.mark.parametrize("drop", [False, True])
def test_an_echo_knows_how_many_outputs_it_makes(factor, drop):
    spec = ej.EchoSpec(factor, batch_size=4)
    for num in (0, 1, 7, 8):
        items = [{"x": i} for i in range(num)]
        for batch in (False, True):
            echo = ej.echo(items, spec, batch=batch, drop_remainder=drop)
            length = len(echo)
            assert length == len([*echo]) == len(echo)
        stacks = [{"x": np.arange(4)}] * (num // 4)
        echo = ej.echo_batches(stacks, spec, drop_remainder=drop)
        assert operator.length_hint(echo) == len([*echo])


@pytest.mark.parametrize(
    ("items", "spec"),
    [
        (iter([1]), ej.EchoSpec(2)),
        ([1], ej.AdaptiveSpec()),
        ([1], ej.EchoSpec(ej.FactorByItem(lambda k: 2, max_factor=2))),
        (grain.MapDataset.range(2).repeat(), ej.EchoSpec(2)),  # for ever
    ],
)
def test_an_echo_of_unknown_length_has_none(items, spec):
    echo = ej.echo(items, spec)
    assert operator.length_hint(echo, 77) == 77
    assert not hasattr(echo, "__len__")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ej.echo([1], 4), "got 4. Use ej.EchoSpec(factor=4)."),
        (lambda: ej.echo([1], None), "got None. Use ej.EchoSpec"),
        (lambda: ej.device.echo_batches([1], 2), "got 2. Use ej.EchoSpec(factor=2)."),
        (lambda: ej.EchoSpec(buffer=4096.0), "got 4096.0. Use buffer=4096."),
        (lambda: ej.AdaptiveSpec(max_uses=2.6), "got 2.6. Use max_uses=3."),
        (lambda: ej.echo([1], ej.EchoSpec(), prefetch=2.0), "got 2.0. Use prefetch=2."),
        (lambda: ej.check_finite([1], max_bad=None), "got None. Use max_bad=0."),
    ],
)
def test_what_is_of_another_kind_is_told_with_its_value_and_the_fix(call, message):
    with pytest.raises(TypeError) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", [np.int32, np.uint8, np.array, jnp.int32])
def test_integers_of_any_kind_are_integers(kind):
    spec = ej.EchoSpec(2, buffer=kind(4), batch_size=kind(2), seed=kind(1))
    assert spec == ej.EchoSpec(2, buffer=4, batch_size=2, seed=1)
    assert type(spec.buffer) is int
    assert ej.AdaptiveSpec(max_uses=kind(3)).max_uses == 3
    assert [*ej.echo([5], ej.EchoSpec(), prefetch=kind(1))] == [5]
    assert ej.FetchSchedule(updates=kind(3)).updates == 3
    assert ej.EchoSpec({np.int64(0): 1, 2: 3}).schedule.total(3) == 5
