"""What the benchmarks train: the workloads' own tasks, on made-up batches."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from echo_jax.models import ImageNetResNet, ResNet, Transformer
from echo_jax.workloads.base import Batch, Task
from echo_jax.workloads.classification import ImageClassifier
from echo_jax.workloads.lm import LanguageModel

Update = Callable[[Any, Batch], Any]

_MEAN, _SCALE = (127.5,) * 3, (73.6,) * 3


def resnet_50(*, small: bool = False) -> ImageClassifier:
    """ResNet-50 v1.5 in bfloat16 at 224 pixels, ghost batch norm over 32 examples."""
    model = ImageNetResNet(
        num_classes=10 if small else 1000,
        stage_sizes=(1, 1) if small else (3, 4, 6, 3),
        width=8 if small else 64,
        virtual_batch=None if small else 32,
        dtype=jnp.float32 if small else jnp.bfloat16,
    )
    return ImageClassifier(model, 32 if small else 224, _MEAN, _SCALE)


def cifar(*, small: bool = False) -> ImageClassifier:
    """The ResNet-32 of CIFAR-10."""
    model = ResNet(num_classes=10, depth=8 if small else 32, width=8 if small else 16)
    return ImageClassifier(model, 32, _MEAN, _SCALE)


def gpt2(*, small: bool = False) -> LanguageModel:
    """GPT-2 small in bfloat16, with 1,024 tokens of context."""
    return LanguageModel(
        Transformer(
            vocab=64 if small else 50_257,
            d_model=16 if small else 768,
            num_layers=1 if small else 12,
            num_heads=1 if small else 12,
            d_ff=32 if small else 3072,
            max_len=16 if small else 1024,
            activation="gelu",
            bias=True,
            tied=True,
            dtype=jnp.float32 if small else jnp.bfloat16,
        )
    )


def images(task: ImageClassifier, rows: int) -> Iterator[Batch]:
    """Yields the same few batches of noise for ever."""
    rng = np.random.default_rng(0)
    shape = (rows, task.image_size, task.image_size, 3)
    batches = [
        {
            "image": rng.integers(0, 256, shape, np.uint8),
            "label": rng.integers(0, task.model.num_classes, rows, np.int32),
        }
        for _ in range(4)
    ]
    return itertools.cycle(batches)


def tokens(task: LanguageModel, rows: int) -> Iterator[Batch]:
    """Yields the same few batches of random tokens for ever."""
    rng = np.random.default_rng(0)
    model = task.model
    shape = (rows, model.max_len + 1)
    batches = [
        {"tokens": rng.integers(0, model.vocab, shape, np.uint16)} for _ in range(4)
    ]
    return itertools.cycle(batches)


def training(task: Task) -> tuple[Any, Update]:
    """Returns a state, and a pure update of it by SGD with momentum."""
    variables = jax.jit(task.init)(jax.random.key(0))
    optimizer = optax.sgd(0.1, momentum=0.9)

    def update(state: Any, batch: Batch) -> Any:
        variables, momentum = state

        def mean_loss(params: Any) -> tuple[jax.Array, Any]:
            given = {**variables, "params": params}
            losses, others, _ = task.loss(given, batch, jax.random.key(1))
            return losses.mean(), others

        grads, others = jax.grad(mean_loss, has_aux=True)(variables["params"])
        changes, momentum = optimizer.update(grads, momentum)
        params = optax.apply_updates(variables["params"], changes)
        return {"params": params, **others}, momentum

    return (variables, optimizer.init(variables["params"])), update
