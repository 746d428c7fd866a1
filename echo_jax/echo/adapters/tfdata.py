"""Echo in a `tf.data` graph: all uses of an element, before the next one is read.

TensorFlow is an extra, ``pip install 'echo-jax[tfdata]'``; the first call imports it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from echo_jax.echo.spec import AnySpec, EchoSpec, check_spec, completed
from echo_jax.echo.stats import UseInfo

__all__ = ["echo"]

_COUNTS_AT_ONCE = 1024


def echo(spec: EchoSpec, *, tags: bool = False) -> Callable[[Any], Any]:
    """Repeats the elements of a `tf.data.Dataset`, back to back.

    Follow it with ``dataset.shuffle(size)`` for the echo of Choi et al. 2019, section
    2: of ``size`` uses a random one leaves. For the other orders and modes give a
    dataset of batches to `echo_jax.echo_batches`, which echoes on the host, or to
    `echo_jax.device.echo_batches`.

    Elements are read on demand. A prefetch, which tf.data may add to any pipeline by
    itself, reads further ahead. The iterator's state is TensorFlow's own, for
    `tf.train.Checkpoint`. A Python function counts the uses, so the dataset cannot be
    saved (``Dataset.save`` of its elements can) or sent to the workers of tf.data's
    service.

    Args:
      spec: An `EchoSpec` of order ``consecutive``; its other fields but ``factor`` are
        not used.
      tags: Whether elements are pairs of element and `echo_jax.UseInfo`, ``int64`` and
        ``int32`` of shape [].

    Returns:
      A function for `tf.data.Dataset.apply`. Elements may have any structure.

    Raises:
      ImportError: TensorFlow is not installed.
      TypeError, ValueError: The spec is of another mode or order.

    Example:
      >>> import tensorflow as tf
      >>> dataset = tf.data.Dataset.range(3).apply(echo(EchoSpec(factor=1.5)))
      >>> [int(element) for element in dataset]
      [0, 1, 1, 2]
    """
    _check(check_spec(spec))
    tf = load_tensorflow()

    def count(carry: Any, index: Any) -> Any:
        return spec.schedule.uses(index[0], _COUNTS_AT_ONCE, carry)

    def number(carry: Any, index: Any) -> Any:
        types = [tf.int64, tf.int64]
        uses, after = tf.numpy_function(count, [carry, index], types, False)
        uses = tf.ensure_shape(uses, index.shape)
        return tf.ensure_shape(after, []), (index, uses)

    def repeat(item: Any, numbers: Any) -> Any:
        index, uses = numbers
        repeats = tf.data.Dataset.range(uses, output_type=tf.int32)
        return repeats.map(lambda r: (item, UseInfo(index, r)) if tags else item)

    @tf.autograph.experimental.do_not_convert
    def apply(dataset: Any) -> Any:
        indices = tf.data.Dataset.range(np.iinfo(np.int64).max)
        indices = indices.batch(_COUNTS_AT_ONCE, drop_remainder=True)
        numbers = indices.scan(np.int64(0), number).unbatch()
        return tf.data.Dataset.zip((dataset, numbers)).flat_map(repeat)

    return apply


def load_tensorflow() -> Any:
    """Imports TensorFlow, which takes ten seconds."""
    try:
        import tensorflow
    except ImportError as error:
        raise ImportError(
            "tf.data needs TensorFlow, which is not installed; run "
            "pip install 'echo-jax[tfdata]'"
        ) from error
    return tensorflow


def _check(spec: AnySpec) -> None:
    way = "Use echo_jax.echo_batches(dataset, spec), on a dataset of batches."
    if not isinstance(spec, EchoSpec):
        raise TypeError(
            "a tf.data graph decides nothing while it runs, so it cannot carry out an "
            f"{type(spec).__name__}. {way}"
        )
    if completed(spec).order != "consecutive":
        raise ValueError(
            f"in a tf.data graph the order must be 'consecutive', got {spec.order!r}. "
            f"{way} Or shuffle the repeats: dataset.shuffle({spec.buffer or 1024})."
        )
