"""Echo for `tf.data`: the graph keeps and copies the elements, the host's plan decides.

The plan runs as a Python function of a few integers, once for each chunk of elements.
TensorFlow is an extra, ``pip install 'echo-jax[tfdata]'``; the first call imports it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from echo_jax.echo.spec import EchoSpec, completed

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

    The sequence of uses is that of the host, and the same in every iteration.

    ``consecutive`` reads elements on demand. The other orders read chunks of elements:
    first ``batch_size``, then twice as many each time, up to ``buffer / factor``.
    A prefetch, which tf.data may add to any pipeline by itself, reads further ahead.

    The iterator's state is TensorFlow's own, for `tf.train.Checkpoint`. Unlike the
    states of the other backends it holds the elements in use. As a Python function
    takes part, the dataset cannot be saved (``Dataset.save`` of its elements can) or
    sent to the workers of tf.data's service.

    ``batch`` and ``drop_remainder`` are as in `echo_jax.echo`. With ``tags``, elements
    are pairs of element and `echo_jax.UseInfo`: ``int64`` and ``int32``, of shape [],
    or [B] in a batch. With a ``state``, that of the plan of an echo of this spec, the
    uses after it follow. The dataset then begins with item ``state["anchor"]``: the
    items in use are read again, as on the host.

    Returns:
      A function for `tf.data.Dataset.apply`. Elements may have any structure. It raises
      TypeError if another order than ``consecutive`` would have to keep datasets,
      optionals or other variants.

    Raises:
      ImportError: TensorFlow is not installed.
      TypeError: The spec is not an `EchoSpec`.
      ValueError: The order does not take this buffer, or the state is of another spec.

    Example:
      >>> import tensorflow as tf
      >>> dataset = tf.data.Dataset.range(3).apply(echo(EchoSpec(factor=1.5)))
      >>> [int(element) for element in dataset]
      [0, 1, 1, 2]
    """
    if not isinstance(spec, EchoSpec):
        raise TypeError(
            "a tf.data graph decides nothing while it runs, so it cannot carry out an "
            f"{type(spec).__name__}; echo its elements on the host: "
            "echo_jax.echo(dataset.as_numpy_iterator(), spec)"
        )
    # Imported here: TensorFlow is an extra, and its import takes ten seconds.
    from echo_jax.echo.adapters.tfdata_graph import GraphEcho

    return GraphEcho(completed(spec), batch, drop_remainder, tags, state)
