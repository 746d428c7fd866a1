"""The same loop with an echo."""

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import echo_jax as ej


class Model(nn.Module):
    """A small classifier."""

    @nn.compact
    def __call__(self, x):
        """Returns logits of ten classes."""
        return nn.Dense(10)(nn.relu(nn.Dense(256)(x.reshape(x.shape[0], -1))))


def batches():
    """Yields batches of random images, read by Grain."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(512, 16, 16)).astype(np.float32)
    dataset = grain.MapDataset.source(images).shuffle(0).repeat()
    dataset = dataset.map_with_index(lambda i, x: {"x": x, "y": np.int32(i % 10)})
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=64)
    return dataset.to_iter_dataset(options).batch(64)


@jax.jit
def step(params, state, batch):
    """One update."""

    def loss_fn(params):
        logits = MODEL.apply(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["y"]
        ).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, state = OPTIMIZER.update(grads, state)
    return optax.apply_updates(params, updates), state, loss


MODEL = Model()
OPTIMIZER = optax.sgd(0.1, momentum=0.9)

if __name__ == "__main__":
    params = MODEL.init(jax.random.key(0), jnp.zeros((1, 16, 16)))
    state = OPTIMIZER.init(params)
    iterator = ej.echo(batches(), ej.EchoSpec(factor=2))
    for _ in range(1):
        params, state, loss = step(params, state, next(iterator))
    print(float(loss))
