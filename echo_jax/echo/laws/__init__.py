"""The laws that every echo obeys, as a check that any echo can be put through.

`assert_echo_laws` feeds an echo items that can be told apart, through an upstream
that counts how often it is read, and compares what comes out with what the spec
asks for. The laws are those of docs/design.md, section 3.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from echo_jax.echo.laws.checks import CHECKS
from echo_jax.echo.laws.devices import assert_device_laws
from echo_jax.echo.laws.harness import CountingUpstream, MakeEcho, Trial
from echo_jax.echo.laws.modes import log_of
from echo_jax.echo.spec import AdaptiveSpec, AnySpec

__all__ = ["CountingUpstream", "assert_device_laws", "assert_echo_laws"]


def assert_echo_laws(
    make_echo: MakeEcho,
    spec: AnySpec,
    *,
    num_items: int = 37,
    laws: Iterable[int] = range(1, 12),
    make_item: Callable[[int], Any] | None = None,
    others: Iterable[MakeEcho] = (),
    read_ahead: int = 0,
    max_rereads: int | None = None,
    positions: Iterable[int] | None = None,
) -> None:
    """Checks that an echo obeys the laws.

    1. Exactness: nothing is lost and nothing extra. A fixed echo uses item k n_k times;
       an adaptive one every item once to ``cap`` times, and as often as that those that
       the buffer holds at the end; a stochastic one takes a fresh batch in its order
       exactly where its coins say so, and ends with the load that finds none.
    2. Identity: at factor 1, order ``consecutive``, at cap 1, or at a load probability
       of 1, the output is the upstream.
    3. Economy: an item that was read is used up, or it is one of ``spec.buffer``
       items in use, and none is read before an output needs it; adaptive and stochastic
       echoes take the items of a batch together.
    4. Restore anywhere: saved after any output and restored into a fresh echo, the
       continuation is the same bit for bit; that of an adaptive echo, whose decisions
       follow from what is ready, where the log of the whole run is replayed. The state
       is JSON of integers, of constant structure and bounded size; of an adaptive echo
       it has a log too, a bit for each batch, whose text takes little more than 4/3 of
       that. A restore reads a bounded number of items again: 1 for ``consecutive``,
       two buffers for ``shuffle``; for ``spread`` at a constant factor e,
       ceil(e) min(1 / (e - 1), 2) buffers (2 at e = 2, below 3 above it, at most 4
       below it), else two; a buffer and the rest of a batch for the other modes. The
       shorter rounds of a warm-up stay below that. For ``shuffle_buffer`` of M uses it
       is (M (ln M + 40) + max(M, 8 batches)) / e + M/8 + 2, which a run of 10^9 uses
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
       places by which merging the cohorts moves a use. Adaptive and stochastic echoes
       hold no item twice in a batch and repeat the last ``buffer`` ones alone; an
       adaptive one puts fresh items first, and repeats none of the batch before while
       four batches of others wait.
    7. Agreement: the sequence of tags is that of the reference plan,
       `echo_jax.echo.plans.make_plan`.
    8. Independence: instances that run in turns, over upstreams of another speed,
       yield one sequence; so do ``others``. Adaptive ones replay a log for it.
    9. Per-use randomness: `use_seed` differs between all uses, repeats count from
       0, and a restored echo gives the keys that the unbroken one gives.
    10. All or nothing: whether a read fails once or for good, an item has another
        shape, or an output is interrupted at some line of the echo's code, an echo goes
        on correctly, or refuses every further use until it goes to a state. It never
        ends a stream that has not ended, and a state saved after a failure, if it gives
        one, is that after the last good output.
    11. One consumer: while a thread waits for an output another one gets a
        ``ValueError``, as from a generator. ``close`` is final and may be called again;
        the echo is a context manager that closes it; and an echo that was closed or
        dropped leaves no thread behind.

    Args:
      make_echo: Builds the echo under test: from a `CountingUpstream` and a spec,
        an iterator of (item, `Tags`) pairs, or of stacked batches with arrays of
        tags. Law 4 asks it for ``get_state`` and ``set_state``. An iterator that
        has ``close`` is closed when it is done with. An adaptive one has ``log``.
      spec: What the echo is to do. ``make_echo`` gets this one, and for law 2 the
        same without repeats. An `AdaptiveSpec` without ``replay`` is also given one: of
        decisions as if items came at random, and of those of runs of its own.
      num_items: Length of the upstream. Law 4 takes time of the order of its
        square.
      laws: Which laws to check. A backend without a state leaves out law 4; one that
        reads elsewhere, such as in another process, laws 10 and 11, for which
        ``CountingUpstream.items`` is a sequence whose reads may fail or wait.
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
        raise ValueError(f"there is no law {sorted(unknown)}; laws are 1 to 11")
    decided = spec
    if isinstance(spec, AdaptiveSpec) and spec.replay is None:
        decided = replace(spec, replay=log_of(spec, num_items))
    trial = Trial(
        make_echo,
        decided,
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
