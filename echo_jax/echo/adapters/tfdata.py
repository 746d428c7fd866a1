"""Echo for `tf.data`: made of native graph operations only.

Nothing of it runs in Python once the dataset is built, so no interpreter lock
holds it up. TensorFlow is an extra, ``pip install 'echo-jax[tfdata]'``, and is imported
by the first call.
"""

from collections.abc import Callable, Mapping
from typing import Any

from echo_jax.echo.spec import EchoSpec

__all__ = ["echo"]


def echo(
    spec: EchoSpec,
    *,
    batch: bool = False,
    drop_remainder: bool = False,
    tags: bool = False,
    state: Mapping[str, int] | None = None,
) -> Callable[[Any], Any]:
    """Repeats the elements of a `tf.data.Dataset` as a spec says.

    The sequence of uses is the one of the host, for every order but
    ``shuffle_buffer``, which is refused, and the same in every iteration. So it may
    also begin where a `Plan` of the same spec stands: the items in use are then read
    again, as many as an echo on the host would read.

    ``consecutive`` reads nothing before it is needed. The other orders work in
    rounds, and read the fresh elements of a round when it begins: up to ``buffer``
    for ``shuffle``; for ``spread`` about ``buffer / (e - 1)`` at a constant factor
    e, up to two buffers. They are kept beside the elements in use, and copied from
    round to round. What a prefetch reads ahead, which tf.data may put behind any
    pipeline by itself, comes on top.

    The iterator's state is TensorFlow's own, for `tf.train.Checkpoint`. Unlike that
    of the other backends it holds the elements in use.

    Args:
      spec: What the echo does. Its factor is a constant or piecewise constant.
      batch: Whether to stack ``spec.batch_size`` uses into one element. Elements
        must then have equal shapes.
      drop_remainder: Whether to leave out a last, smaller batch.
      tags: Whether elements are pairs of element and `echo_jax.Tags`: ``int64``
        and ``int32``, of shape [], or [B] in a batch.
      state: Of a `echo_jax.echo.plans.fixed.FixedPlan` of this spec, from its
        ``get_state``: the uses after it. The dataset then begins with item
        ``state["anchor"]``.

    Returns:
      A function for `tf.data.Dataset.apply`. Elements may have any structure;
      it raises TypeError where ``spread`` or ``shuffle`` would have to keep
      datasets, optionals or other variants.

    Raises:
      ImportError: If TensorFlow is not installed.
      TypeError: If the factor is a Python function.
      ValueError: If the order is ``shuffle_buffer``, or the buffer is too small for
        ``spread`` without twins.

    Example:
      >>> import tensorflow as tf
      >>> dataset = tf.data.Dataset.range(3).apply(echo(EchoSpec(factor=1.5)))
      >>> [int(element) for element in dataset]
      [0, 1, 1, 2]
    """
    if not isinstance(spec, EchoSpec):
        raise TypeError(
            f"a tf.data graph decides nothing while it runs, so it cannot carry out an "
            f"{type(spec).__name__}; echo its elements on the host: "
            "echo_jax.echo(dataset.as_numpy_iterator(), spec)"
        )
    if spec.schedule.by_item is not None:
        raise TypeError(
            f"factor={spec.factor!r} is a Python function, which a tf.data graph "
            "cannot call; give a piecewise factor such as {0: 1, 10_000: 4}, or echo "
            "on the host with echo_jax.echo"
        )
    if spec.order == "shuffle_buffer":
        raise ValueError(
            "order='shuffle_buffer' has no form in a tf.data graph, which works in "
            "rounds of fixed items, because how old an item gets in that buffer is not "
            "bounded; use order='shuffle', or echo the dataset's NumPy iterator: "
            "echo_jax.echo(dataset.as_numpy_iterator(), spec)"
        )
    # Imported here: TensorFlow is an extra, and takes ten seconds.
    from echo_jax.echo.adapters.tfdata_graph import graph_echo

    return graph_echo(
        spec, batch=batch, drop_remainder=drop_remainder, tags=tags, state=state
    )
