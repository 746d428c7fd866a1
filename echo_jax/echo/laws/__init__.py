"""The laws that every echo obeys, as a check that any echo can be put through.

`assert_echo_laws` feeds an echo items that can be told apart, through an upstream
that counts how often it is read, and compares what comes out with what the spec
asks for. The laws are those of docs/design.md, section 3.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from echo_jax.echo.laws.checks import CHECKS
from echo_jax.echo.laws.harness import CountingUpstream, MakeEcho, Trial
from echo_jax.echo.spec import EchoSpec

__all__ = ["CountingUpstream", "assert_echo_laws"]


def assert_echo_laws(
    make_echo: MakeEcho,
    spec: EchoSpec,
    *,
    num_items: int = 37,
    laws: Iterable[int] = range(1, 10),
    make_item: Callable[[int], Any] | None = None,
    others: Iterable[MakeEcho] = (),
    read_ahead: int = 0,
    max_rereads: int | None = None,
    positions: Iterable[int] | None = None,
) -> None:
    """Checks that an echo obeys the laws.

    1. Exactness: item k is used n_k times, nothing is lost and nothing extra.
    2. Identity: at factor 1, order ``consecutive``, the output is the upstream.
    3. Economy: an item that was read is used up, or it is one of ``spec.buffer``
       items in use, and none is read before an output needs it.
    4. Restore anywhere: saved after any output and restored into a fresh echo, the
       continuation is the same bit for bit. The state is JSON of integers, of
       constant structure and bounded size, and a restore reads a bounded number
       of items again: 1 for ``consecutive``, two buffers for ``shuffle``; for
       ``spread`` at a constant factor e, ceil(e) min(1 / (e - 1), 2) buffers (2
       at e = 2, below 3 above it, at most 4 below it), else two. The shorter
       rounds of a warm-up stay below that. For ``shuffle_buffer`` of M uses it is
       (M (ln M + 40) + max(M, 8 batches)) / e + M/8 + 2, which a run of 10^9 uses
       exceeds with a probability below 10^-8 / M.
    5. No aliasing: writing into an output raises, or changes nothing else.
    6. Bounded lag: ``consecutive`` repeats at once; with ``shuffle`` no use comes
       after one of an item ``buffer`` or more younger; with ``shuffle_buffer`` use n
       (from 0, those of an item back to back) is not among the first n - buffer + 1,
       and how late it comes is left to chance; with ``spread`` no batch
       holds an item twice until the upstream ends, repeats start with the second
       batch where all items of the first have some, and once warm at a constant
       factor every batch holds floor(B/e) or ceil(B/e) fresh items, and lags lie
       between half a round and one and a half, give or take the ceil(e) + 2
       places by which merging the cohorts moves a use.
    7. Agreement: the sequence of tags is that of `echo_jax.echo.plans.fixed.Plan`.
    8. Independence: instances that run in turns, over upstreams of another speed,
       yield one sequence; so do ``others``.
    9. Per-use randomness: `use_seed` differs between all uses, repeats count from
       0, and a restored echo gives the keys that the unbroken one gives.

    Args:
      make_echo: Builds the echo under test: from a `CountingUpstream` and a spec,
        an iterator of (item, `Tags`) pairs, or of stacked batches with arrays of
        tags. Law 4 asks it for ``get_state`` and ``set_state``. An iterator that
        has ``close`` is closed when it is done with.
      spec: What the echo is to do. ``make_echo`` gets this one, and for law 2 the
        same with factor 1.
      num_items: Length of the upstream. Law 4 takes time of the order of its
        square.
      laws: Which laws to check. A backend without a state leaves out law 4.
      make_item: From an index to a new item: a pytree with array leaves. By
        default a dict of the index and a payload that no other item has.
      others: More ways to build the same echo, say with other worker counts or
        prefetch depths, which must yield the same sequence (law 8).
      read_ahead: How many items the backend may read before they are needed, such
        as the depth of a prefetch inside the echo.
      max_rereads: How many items a restore may read again, if it is not to be
        what law 4 says of the order.
      positions: Numbers of outputs after which law 4 restores; by default all,
        from 0 on.

    Raises:
      AssertionError: At the first broken law, with its number, the position, and
        what was expected and found.
      ValueError: If a law is unknown.

    Example:
      >>> import echo_jax as ej
      >>> spec = ej.EchoSpec(factor=2.5, order="shuffle", buffer=8)
      >>> assert_echo_laws(lambda up, spec: ej.echo(up, spec, tags=True), spec)
      >>> def forgets_the_last_use(upstream, spec):
      ...     yield from list(ej.echo(upstream, spec, tags=True))[:-1]
      >>> assert_echo_laws(forgets_the_last_use, ej.EchoSpec(2), num_items=3)
      Traceback (most recent call last):
      AssertionError: law 1 (exactness) is broken for item 2: expected 2 uses, got 1; \
EchoSpec(factor=2, buffer=1, order='consecutive', batch_size=1, seed=0), num_items=3
    """
    laws = sorted(set(laws))
    if unknown := set(laws) - set(CHECKS):
        raise ValueError(f"there is no law {sorted(unknown)}; laws are 1 to 9")
    trial = Trial(
        make_echo,
        spec,
        num_items,
        make_item or _recognisable_item,
        tuple(others),
        read_ahead,
        max_rereads,
        None if positions is None else tuple(positions),
    )
    record = trial.record()
    for law in laws:
        CHECKS[law](trial, record)


def _recognisable_item(index: int) -> dict[str, np.ndarray]:
    """An item that no other item shares a leaf's content with."""
    payload = np.arange(12, dtype=np.float32).reshape(3, 4) + 100 * index
    return {"index": np.array(index), "payload": payload}
