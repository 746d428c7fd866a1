"""What holds for every augmentation, and for chains of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from augment_reference import make_keys

from benchmarks.augment import h4, operations
from echo_jax.data.augment import (
    Augment,
    ColourDistortion,
    Cutout,
    Flip,
    Mixup,
    PadCrop,
    RandomResizedCrop,
    ToFloat,
)
from echo_jax.data.sources.shapes import SHIFT_PIXELS, augment_shapes

pytestmark = pytest.mark.usefixtures("all_compiled_soon")

HEIGHT, WIDTH, BATCH = 12, 16, 8
STAGES = [
    PadCrop(3),
    PadCrop(3, border="zero"),
    Flip(),
    RandomResizedCrop(size=10),
    ColourDistortion(),
    Cutout(size=5),
    Mixup(num_classes=4, alpha=1.0),
    ToFloat(),
    Augment((RandomResizedCrop(size=10), Flip(), Cutout(size=4))),
]
EVERYTHING = Augment(
    (
        RandomResizedCrop(size=10),
        PadCrop(2),
        Flip(),
        ColourDistortion(),
        Cutout(size=5),
        Mixup(num_classes=4),
    )
)
RANDOM = [one for one in STAGES if one != ToFloat()]


def make_batch(size=BATCH, boxes=False, seed=0):
    rng = np.random.default_rng(seed)
    batch = {
        "image": rng.integers(0, 256, (size, HEIGHT, WIDTH, 3), np.uint8),
        "label": rng.integers(0, 4, size, np.int32),
        "name": np.arange(size),
    }
    if boxes:
        corners = np.sort(rng.uniform(0, 1, (size, 5, 2, 2)), axis=2)
        mask = np.arange(5)[None] < rng.integers(0, 6, size)[:, None]
        corners = corners.reshape(size, 5, 4) * mask[..., None]
        batch |= {"boxes": corners.astype(np.float32), "box_mask": mask}
        batch["box_labels"] = rng.integers(0, 9, (size, 5), np.int32)
    return batch


@functools.cache
def compiled(one):
    return jax.jit(one)


def assert_equal(one, other, levels=0):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        left, right = (np.asarray(x[name], np.float64) for x in (one, other))
        tolerance = levels if name == "image" else 1e-6
        np.testing.assert_allclose(left, right, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("one", STAGES, ids=repr)
def test_types_and_shapes(one):
    batch = make_batch()
    result = jax.eval_shape(one, batch, make_keys(BATCH))
    resized = isinstance(one, RandomResizedCrop | Augment)
    assert result["image"].shape == (BATCH, *((10, 10) if resized else (12, 16)), 3)
    assert result["image"].dtype == (jnp.float32 if one == ToFloat() else jnp.uint8)
    if isinstance(one, Mixup):
        assert (result["label"].shape, result["label"].dtype) == ((8, 4), jnp.float32)
    else:
        assert (result["label"].shape, result["label"].dtype) == ((8,), jnp.int32)
    in_float = {**batch, "image": batch["image"].astype(jnp.float32)}
    assert jax.eval_shape(one, in_float, make_keys(BATCH))["image"].dtype == jnp.float32


@pytest.mark.parametrize("one", STAGES, ids=repr)
def test_a_use_depends_on_its_key_alone(one):
    """Neither on its place in the batch nor on the other examples."""
    boxes = not isinstance(one, Mixup)
    batch, other = make_batch(boxes=boxes), make_batch(boxes=boxes, seed=1)
    keys, other_keys = make_keys(BATCH), make_keys(BATCH, seed=1)
    run = compiled(one)
    result = run(batch, keys)
    assert_equal(result, run(batch, keys))
    # Partners of a mixture stay together, and change places with each other.
    order = np.array([5, 4, 0, 1, 7, 6, 2, 3])
    moved = run({name: x[order] for name, x in batch.items()}, keys[order])
    assert_equal(moved, {name: np.asarray(x)[order] for name, x in result.items()})
    among = np.arange(BATCH) < 2
    mixed = {
        name: np.where(among.reshape(-1, *[1] * (x.ndim - 1)), x, other[name])
        for name, x in batch.items()
    }
    among_others = run(mixed, jnp.where(among, keys, other_keys))
    first, found = (jax.tree.map(lambda x: x[:2], b) for b in (result, among_others))
    assert_equal(first, found)
    assert (result["name"] == batch["name"]).all()


@pytest.mark.parametrize("one", RANDOM, ids=repr)
def test_other_keys_give_other_images(one):
    batch = make_batch(boxes=not isinstance(one, Mixup))
    if not isinstance(one, Mixup):
        batch["image"][:] = batch["image"][0]
    results = [
        np.asarray(compiled(one)(batch, make_keys(BATCH, seed))["image"])
        for seed in (1, 2)
    ]
    assert (results[0] != results[1]).any()
    assert len({image.tobytes() for image in results[0]}) > 1


@pytest.mark.slow  # every operation is compiled on its own
def test_compilation_changes_nothing_but_roundings():
    batch, keys = jax.tree.map(jnp.asarray, make_batch()), make_keys(BATCH)
    assert_equal(EVERYTHING(batch, keys), compiled(EVERYTHING)(batch, keys), levels=2)


def test_stages_of_a_chain_are_independent():
    batch, keys = make_batch(), make_keys(BATCH)
    chain = Augment((PadCrop(3), Flip(), Flip()))
    fold_in = jax.jit(lambda key, n: jax.random.key_data(jax.random.fold_in(key, n)))
    expected = batch
    for number, one in enumerate(chain.stages):
        own = [fold_in(keys[at], number) for at in range(BATCH)]
        own = jax.random.wrap_key_data(np.stack(own))
        expected = compiled(one)(expected, own)
    assert_equal(compiled(chain)(batch, keys), expected)
    # Were their keys the same, two flips would undo each other.
    batch, twice = make_batch(64), Augment((Flip(), Flip()))
    flipped = np.asarray(compiled(twice)(batch, make_keys(64))["image"])
    assert 16 < (flipped != batch["image"]).any(axis=(1, 2, 3)).sum() < 48


def test_equal_augmentations_share_a_compilation():
    traces = []

    @functools.partial(jax.jit, static_argnames="augment")
    def step(batch, keys, augment):
        traces.append(augment)
        return augment(batch, keys)

    for padding in (3, 3, 2):
        step(make_batch(), make_keys(BATCH), augment=Augment((PadCrop(padding),)))
    assert len(traces) == 2


def test_floats_save_the_rounding_between_stages():
    batch, keys = make_batch(), make_keys(BATCH)
    mix = Mixup(num_classes=4, alpha=1.0)
    rounded = np.asarray(compiled(mix)(batch, keys)["image"])
    exact = np.asarray(compiled(mix)(ToFloat()(batch, keys), keys)["image"])
    assert not (exact == np.round(exact)).all()
    assert np.abs(rounded - exact).max() <= 0.5


def test_no_stage_makes_devices_communicate():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    sharded = jax.jit(EVERYTHING, in_shardings=rows, out_shardings=rows)
    batch, keys = make_batch(), make_keys(BATCH)
    program = sharded.lower(batch, keys).compile()
    text = program.as_text()
    assert "u8[2,12,16,3]" in text  # a quarter of the batch of 8
    words = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    assert not [word for word in words if word in text]
    assert_equal(program(batch, keys), compiled(EVERYTHING)(batch, keys))


def test_shapes_are_shifted_and_flipped_like_on_the_host():
    assert augment_shapes == Augment((PadCrop(SHIFT_PIXELS), Flip()))
    image = make_batch(1)["image"]
    batch = {"image": np.broadcast_to(image, (512, *image.shape[1:]))}
    shifted = np.asarray(compiled(augment_shapes)(batch, make_keys(512))["image"])
    found = {image.tobytes() for image in shifted}
    padded = np.pad(image[0], ((4, 4), (4, 4), (0, 0)), "reflect")
    crops = [padded[y : y + 12, x : x + 16] for y in range(9) for x in range(9)]
    crops += [crop[:, ::-1] for crop in crops]
    assert found <= {np.ascontiguousarray(crop).tobytes() for crop in crops}
    assert len(found) > 140  # of 162: 512 draws miss about 7


@pytest.mark.parametrize(
    ("one", "changes", "message"),
    [
        (augment_shapes, {"image": jnp.zeros((8, 12, 16))}, r"shape \(8, 12, 16\)"),
        (PadCrop(12), {}, "padding=12 mirrors more"),
        (ColourDistortion(), {"image": jnp.zeros((8, 4, 4, 1))}, "1 channels"),
        (Mixup(4), {"image": jnp.zeros((7, 4, 4, 3))}, "batch of 7"),
        (Mixup(4), {"boxes": jnp.zeros((8, 1, 4))}, "boxes cannot be mixed"),
    ],
)
def test_what_cannot_be_done_is_refused(one, changes, message):
    with pytest.raises(ValueError, match=message):
        one({**make_batch(), **changes}, make_keys(BATCH))


def test_keys_must_be_one_for_each_example():
    raw = jax.random.key_data(make_keys(BATCH))
    for keys, found in ((make_keys(7), r"key<fry>\[7\]"), (raw, r"uint32\[8, 2\]")):
        with pytest.raises(ValueError, match=found):
            augment_shapes(make_batch(), keys)


@pytest.mark.slow
def test_the_benchmark_runs_in_small():
    result = h4(small=True, repeats=1)
    assert result.id == "H4" and result.value > 0
    results = operations(batch_size=4, pixels=20, repeats=1)
    names = ["RandomResizedCrop", "PadCrop", "Flip", "ColourDistortion"]
    names += ["Cutout", "Mixup"]
    assert [one.id for one in results] == [f"augment-{name}" for name in names]
