"""Laws 12 and 13, for an echo in accelerator memory."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from echo_jax.echo.keys import seed_for_use
from echo_jax.echo.laws.harness import CountingUpstream, close
from echo_jax.echo.spec import AnySpec, EchoSpec, completed

MakeDeviceEcho = Callable[[CountingUpstream, Any, Any], Iterator[Any]]


def assert_device_laws(
    make_echo: MakeDeviceEcho, spec: AnySpec, *, num_batches: int = 3, rows: int = 0
) -> None:
    """Checks the two laws of an echo that augments batches on devices.

    12. No padding: an augmentation sees only the rows of its batch and their keys. So
        the output of a smaller last batch does not depend on any padding.
    13. Explicit transfers: the echo runs, and goes to a state, under
        ``jax.transfer_guard("disallow")``.

    Args:
      make_echo: Builds the echo under test from an iterator of host batches, a spec
        and an augmentation ``(batch, keys) -> batch``. It yields pairs of a batch and
        its `UseInfo`.
      spec: The echo to test.
      num_batches: Number of host batches in a run.
      rows: Rows of a host batch; 0 for ``spec.batch_size``.

    Raises:
      AssertionError: A law is broken. The message has the law's number, the output, the
        expected value and the found one.
      ValueError: All batches of a fixed echo are whole, so law 12 was not checked.

    Example:
      >>> import echo_jax as ej
      >>> def make_echo(batches, spec, augment):
      ...     return ej.device.echo_batches(batches, spec, augment=augment, tags=True)
      >>> assert_device_laws(make_echo, ej.EchoSpec(2, batch_size=40), rows=16)
    """
    spec = completed(spec)
    rows = rows or spec.batch_size
    index = np.arange(num_batches * rows, dtype=np.int32).reshape(num_batches, rows)

    def start() -> Any:
        upstream = CountingUpstream([{"index": part} for part in index])
        return make_echo(upstream, spec, _seen_by_all)

    with _guarded(spec):
        echo = start()
        outputs = [next(echo)]
        if hasattr(echo, "get_state"):
            again = start()
            again.set_state(echo.get_state())
            next(again, None)
            close(again)
        outputs += echo
        close(echo)
    for position, (batch, tags) in enumerate(outputs):
        seeds = seed_for_use(spec.seed, tags.fresh_index, tags.repeat).view(np.uint32)
        words = jax.device_put(seeds.reshape(-1, 2))
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        whole = {"index": np.asarray(tags.fresh_index, np.int32)}
        due, found = jax.device_get((_seen_by_all(whole, keys), batch))
        for name, values in due.items():
            if found[name].tolist() != values.tolist():
                raise AssertionError(
                    f"law 12 (no padding) is broken at output {position}: expected "
                    f"{name} {values.tolist()}, got {found[name].tolist()}; {spec}"
                )
    sizes = {tags.repeat.size for _, tags in outputs}
    if isinstance(spec, EchoSpec) and sizes <= {spec.batch_size}:
        raise ValueError(
            f"all batches have batch_size={spec.batch_size} rows, so padding was not "
            f"checked. Choose other rows or num_batches than {rows} and {num_batches}."
        )


def _seen_by_all(batch: Any, keys: Any) -> Any:
    """Returns an augmented batch in which every row describes the whole batch."""
    index, words = batch["index"], jax.random.key_data(keys)
    words = words[:, 0] + 3 * words[:, 1]
    return {
        "index": index,
        "rows": 0 * index + len(index),
        "sum": 0 * index + index.sum(),
        "keys": 0 * words + words.sum(dtype=words.dtype),
    }


@contextlib.contextmanager
def _guarded(spec: AnySpec) -> Iterator[None]:
    """Disallows implicit transfers in all threads of the process."""
    with contextlib.ExitStack() as stack:
        for way in ("host_to_device", "device_to_device", "device_to_host"):
            name = f"jax_transfer_guard_{way}"
            stack.callback(jax.config.update, name, getattr(jax.config, name))
            jax.config.update(name, "disallow")
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "Disallowed" not in str(error):
                raise
            raise AssertionError(
                f"law 13 (explicit transfers) is broken: {error}; use jax.device_put, "
                f"or a jax.transfer_guard of your own; {spec}"
            ) from error
