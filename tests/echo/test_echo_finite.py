"""Items that are not finite, before an echo; and what writes into items behind it."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from echo_cases import MODES, ORDERS, SIZES, grain_source
from hypothesis import given, settings
from hypothesis import strategies as st

import echo_jax as ej
from echo_jax.echo.finite import is_finite, what_is_bad

FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64")
SPECS = {
    "consecutive-1": ej.EchoSpec(1, 1, "consecutive", 4),
    **{order: ej.EchoSpec(2.5, SIZES[order][0], order, 4) for order in ORDERS},
    **MODES,
}
NESTS = (
    lambda leaf: leaf,
    lambda leaf: [leaf, 3],
    lambda leaf: (b"", {"a": leaf, "b": None}),
    lambda leaf: leaf[0] if leaf.size else leaf,
)


@settings(max_examples=60)
@given(st.data())
def test_a_tree_is_finite_if_all_its_floats_are(data):
    numbers = st.floats(-9, 9) | st.sampled_from([math.nan, math.inf, -math.inf])
    kinds = st.tuples(st.sampled_from(FLOATS), st.sampled_from(NESTS))
    words = np.array(["nan"]), np.array([{}], object), np.zeros(2, "datetime64[s]")
    tree, fine = {"label": np.arange(3), "more": ["nan", b"", None, words]}, True
    for number, (dtype, nest) in enumerate(data.draw(st.lists(kinds, max_size=3))):
        values = data.draw(st.lists(numbers, max_size=4))
        leaf = np.array(values).astype(jnp.dtype(dtype))
        held = leaf.reshape(-1)[:1] if nest is NESTS[-1] else leaf
        fine = fine and all(np.isfinite(each) for each in held.tolist())
        tree[number] = nest(leaf)
    assert is_finite(tree) is fine
    assert (what_is_bad(tree) == "") is fine


def test_what_is_bad_is_said_with_its_path_and_counts():
    item = {"x": np.array([[np.nan, 1], [np.inf, np.nan]]), "y": [1.0, -math.inf]}
    assert what_is_bad(item) == (
        "item['x'] holds NaN or infinity in 3 of 4 values, "
        "item['y'][1] holds NaN or infinity in 1 of 1 values"
    )
    assert (
        what_is_bad(jnp.array([jnp.nan]))
        == "item holds NaN or infinity in 1 of 1 values"
    )


BAD = {2, 3, 17, 29}


def items(count=40):
    """Item k is k, with a NaN in the bad ones."""
    for k in range(count):
        yield {"x": np.array([k, np.nan if k in BAD else k]), "k": np.array(k)}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_bad_item_is_never_used_and_counted(name, prefetch):
    fresh = ej.check_finite(items(), max_bad=4)
    options = {"batch": True, "tags": True, "prefetch": prefetch}
    with ej.echo(fresh, SPECS[name], **options) as echo:
        batches = list(echo)
    used = np.concatenate([batch["x"] for batch, _ in batches])
    assert np.isfinite(used).all()
    assert set(used[:, 0].astype(int)) == set(range(40)) - BAD
    # The fresh indices have no gaps.
    index = np.concatenate([tags.fresh_index for _, tags in batches])
    assert set(index.tolist()) == set(range(36))
    assert (fresh.taken, fresh.skipped) == (40, 4)


def test_one_more_than_the_limit_is_an_error_with_its_number():
    fresh = ej.check_finite(items(), max_bad=2)
    assert [int(next(fresh)["k"]) for _ in range(15)] == [0, 1, *range(4, 17)]
    said = r"item 17 is not finite: item\['x'\] holds .* 1 of 2 values; .*max_bad=3"
    with pytest.raises(ej.BadItemError, match=said):
        next(fresh)
    # It goes on behind it.
    assert int(next(fresh)["k"]) == 18


@pytest.mark.parametrize("name", ["spread", "stochastic"])
def test_what_follows_a_restore_is_the_same(name):
    def start():
        fresh = ej.check_finite(iter(grain_source(list(items()))), max_bad=4)
        return fresh, ej.echo(fresh, SPECS[name], batch=True, tags=True)

    def plain(output):
        batch, tags = output
        return batch["x"].tolist(), tags.fresh_index.tolist(), tags.repeat.tolist()

    fresh, whole = start()
    states, outputs = [], []
    while True:
        states.append(json.loads(json.dumps(whole.get_state())))
        try:
            outputs.append(plain(next(whole)))
        except StopIteration:
            break
    for position, state in enumerate(states):
        again, echo = start()
        echo.set_state(state)
        assert [plain(output) for output in echo] == outputs[position:]
        assert (again.taken, again.skipped) == (fresh.taken, fresh.skipped)


def test_what_check_finite_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"got -1\. Use max_bad=0"):
        ej.check_finite([], max_bad=-1)
    fresh = ej.check_finite(iter(grain_source([1.0])))
    with pytest.raises(ValueError, match=r"keys \['next'\] is none of check_finite"):
        fresh.set_state({"next": 3})
    assert not hasattr(ej.check_finite([1.0]), "get_state")


@pytest.mark.parametrize("name", ["consecutive-1", "spread", *MODES])
def test_a_consumer_that_writes_into_an_item_fails_at_the_first(name):
    mine = [{"x": np.arange(3.0)} for _ in range(40)]
    for build, source in ((ej.echo, mine), (ej.grain.echo, grain_source(mine))):
        for prefetch in (None, 2):
            with iter(build(source, SPECS[name], prefetch=prefetch)) as echo:
                for item in [next(echo) for _ in range(6)]:
                    with pytest.raises(ValueError, match="read-only"):
                        item["x"][1:] *= 2
                    del item["x"]
    assert all(each["x"].tolist() == [0, 1, 2] for each in mine)
    assert mine[0]["x"].flags.writeable


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_echo_of_finite_items_has_epochs_as_its_loader(prefetch):
    loader = [{"x": np.array([1.0, k])} for k in (0.0, np.nan, 2.0)]
    items = ej.check_finite(loader, max_bad=2)
    echo = ej.echo_batches(items, ej.EchoSpec(2), prefetch=prefetch)
    assert [[len([*echo]) for _ in range(2)], items.skipped] == [[4, 4], 2]
