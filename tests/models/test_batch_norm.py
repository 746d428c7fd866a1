import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from echo_jax.models.batch_norm import GhostBatchNorm

X = np.random.default_rng(0).normal(3, 2, size=(16, 3, 3, 4)).astype(np.float32)
VARIABLES = {
    "params": {
        "scale": np.array([1, 2, -1, 0.5], np.float32),
        "bias": np.array([0, 1, 2, -3], np.float32),
    },
    "batch_stats": {
        "mean": np.array([0, 1, 2, 3], np.float32),
        "var": np.array([1, 4, 9, 16], np.float32),
    },
}


def train(x, variables=VARIABLES, **fields):
    norm = GhostBatchNorm(**fields)
    return jax.jit(
        lambda x: norm.apply(variables, x, train=True, mutable=["batch_stats"])
    )(x)


def by_numpy(x, virtual_batch, momentum=0.9):
    """What the definition says, in float64, a virtual batch at a time.

    The running statistics are those of all examples.
    """
    params, stats = VARIABLES["params"], VARIABLES["batch_stats"]
    outputs = []
    for start in range(0, len(x), virtual_batch):
        part = x[start : start + virtual_batch].astype(np.float64)
        mean, var = part.mean(axis=(0, 1, 2)), part.var(axis=(0, 1, 2))
        normal = (part - mean) / np.sqrt(var + 1e-5)
        outputs.append(normal * params["scale"] + params["bias"])
    running = {
        name: momentum * stats[name] + (1 - momentum) * of_all
        for name, of_all in (
            ("mean", x.astype(np.float64).mean(axis=(0, 1, 2))),
            ("var", x.astype(np.float64).var(axis=(0, 1, 2))),
        )
    }
    return np.concatenate(outputs), running


@pytest.mark.parametrize("virtual_batch", [1, 4, 8, 16])
def test_virtual_batches_are_normalised_each_by_itself(virtual_batch):
    expected, running = by_numpy(X, virtual_batch)
    y, new = train(X, virtual_batch=virtual_batch)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    for name, value in running.items():
        np.testing.assert_allclose(new["batch_stats"][name], value, rtol=1e-5)


def test_virtual_batches_whose_means_differ_have_the_variance_of_all():
    """Their variances are 0, and that of all examples is 4."""
    x = np.repeat(np.float32([1, 5]), 8).reshape(16, 1, 1, 1) * np.ones(4, np.float32)
    _, new = train(x, virtual_batch=8)
    stats = VARIABLES["batch_stats"]
    np.testing.assert_allclose(new["batch_stats"]["var"], 0.9 * stats["var"] + 0.4)


def test_without_virtual_batches_it_is_flaxs_batch_norm():
    flax_norm = nn.BatchNorm(use_running_average=False, momentum=0.9)
    expected, new = flax_norm.apply(VARIABLES, X, mutable=["batch_stats"])
    y, ours = train(X)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        ours["batch_stats"],
        new["batch_stats"],
    )


def test_evaluation_uses_the_running_statistics_and_any_batch():
    norm = GhostBatchNorm(virtual_batch=8)
    y = norm.apply(VARIABLES, X[:3], train=False)
    params, stats = VARIABLES["params"], VARIABLES["batch_stats"]
    normal = (X[:3] - stats["mean"]) / np.sqrt(stats["var"] + 1e-5)
    expected = normal * params["scale"] + params["bias"]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def loss_and_gradient(mesh_size):
    """Of a sum that depends on every output, and the new statistics, on devices."""
    mesh = Mesh(np.array(jax.devices()[:mesh_size]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    norm = GhostBatchNorm(virtual_batch=2)

    def loss(params, x):
        variables = {**VARIABLES, "params": params}
        y, new = norm.apply(variables, x, train=True, mutable=["batch_stats"])
        weights = jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape)
        return (jnp.sin(weights) * y).mean(), new

    step = jax.jit(jax.value_and_grad(loss, has_aux=True), in_shardings=(whole, split))
    compiled = step.lower(VARIABLES["params"], X).compile()
    return jax.device_get(compiled(VARIABLES["params"], X)), compiled.as_text()


def test_one_and_eight_devices_agree():
    one, _ = loss_and_gradient(1)
    eight, _ = loss_and_gradient(8)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, eight
    )


def test_activations_stay_on_their_device():
    # 16 examples on 8 devices: each holds one virtual batch of 2. What crosses is
    # summed over the devices, channel by channel, never gathered.
    _, program = loss_and_gradient(8)
    assert "all-reduce" in program
    for gathering in ("all-gather", "all-to-all", "collective-permute"):
        assert gathering not in program


def test_statistics_are_float32_whatever_the_input():
    # In bfloat16, 256 + 1 is 256: a mean there would lose these differences.
    x = (256 + 8 * (np.arange(64) % 2)).reshape(16, 2, 2, 1).astype(jnp.bfloat16)
    norm = GhostBatchNorm(dtype=jnp.bfloat16)
    variables = norm.init(jax.random.key(0), x, train=False)
    y, new = train(x, variables, dtype=jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    dtypes = {leaf.dtype for leaf in jax.tree.leaves((variables, new))}
    assert dtypes == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(new["batch_stats"]["mean"], [26.0], rtol=1e-6)
    np.testing.assert_allclose(np.float32(y).ravel()[:2], [-1, 1], rtol=1e-2)


def test_a_batch_that_virtual_batches_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"16 must be a multiple of virtual_batch=5"):
        train(X, virtual_batch=5)
