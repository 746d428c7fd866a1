"""The laws that every echo obeys (docs/laws.md), as a check for any echo.

`assert_echo_laws` feeds an echo distinguishable items through an upstream that counts
its reads. It compares the output with the spec's demands.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from echo_jax.echo.laws.checks import CHECKS
from echo_jax.echo.laws.devices import assert_device_laws
from echo_jax.echo.laws.failures import Interrupted as Interrupted
from echo_jax.echo.laws.failures import interruption as interruption
from echo_jax.echo.laws.harness import CountingUpstream, MakeEcho, Trial, plan_run
from echo_jax.echo.orders import rounds_of
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, EchoSpec, completed

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
) -> None:
    """Checks that an echo obeys the laws of docs/laws.md.

    1. Exactness: every item has the uses, and every use the item, that the spec says.
    2. Identity: without repeats the output is the upstream.
    3. Economy: no item is read before an output needs it, and every item that was read
       is used up or in the buffer.
    4. Restore anywhere: the state after any output, as JSON, gives a fresh echo the
       same continuation, and reads a bounded number of items again. It is integers, of
       constant structure and bounded size, and for an adaptive echo a `DecisionLog`.
    5. No aliasing: writing into an output raises, or changes nothing else.
    6. Bounded lag: the uses of an item are as near as the order or mode promises.
    7. Agreement: the tags are the plan's, `echo_jax.echo.plans.make_plan`.
    8. Independence: instances that run in turns, over upstreams of another speed,
       yield one sequence; so do ``others``.
    9. Per-use randomness: repeats of an item count from 0, so `seed_for_use` differs
       between all uses.
    10. All or nothing: after a failed read, an item of another shape, or an
        interruption, the echo continues correctly, or refuses every use until a state
        is set. A state that it gives then is that after the last good output.
    11. One consumer: another thread gets a ``ValueError``. ``close`` and the end of a
        ``with`` are final, and leave no thread behind.

    The bounds of laws 4 and 6 are at the end of that page.

    Args:
      make_echo: Builds the echo under test: from a `CountingUpstream` and a spec, an
        iterator of (item, `UseInfo`) pairs, or of stacked batches with arrays of tags.
        Law 4 needs ``get_state`` and ``set_state``. ``close``, if it has one, is called
        at the end. An adaptive echo has ``log``.
      spec: The echo to test. For law 2 ``make_echo`` gets it without repeats. An
        `AdaptiveSpec` without ``replay`` is tested with random decisions to replay,
        and with the decisions of its own run.
      num_items: Length of the upstream. The time of law 4 grows with its square.
      laws: Numbers of the laws to check. A backend without a state omits law 4. A
        backend that reads elsewhere, such as in another process, omits laws 10 and 11,
        because they make reads of ``CountingUpstream.items`` fail or wait.
      make_item: From an index to a new item: a pytree with array leaves. By default a
        dict of the index and a payload that no other item has.
      others: More ways to build the same echo (law 8), such as with other worker counts
        or prefetch depths.
      read_ahead: How many items the backend may read before they are needed, such as
        the depth of a prefetch inside the echo.
      max_rereads: How many items a restore may read again; by default law 4's bound.

    Raises:
      AssertionError: A law is broken. The message has the law's number, the position,
        the expected value and the found one.
      ValueError: A law is unknown.

    Example:
      >>> import echo_jax as ej
      >>> spec = ej.EchoSpec(factor=2.5, order="window_shuffle", buffer=8)
      >>> assert_echo_laws(lambda up, spec: ej.echo(up, spec, tags=True), spec)
      >>> def forgets_the_last_use(upstream, spec):
      ...     yield from list(ej.echo(upstream, spec, tags=True))[:-1]
      >>> assert_echo_laws(forgets_the_last_use, ej.EchoSpec(2), num_items=3)
      Traceback (most recent call last):
      AssertionError: law 1 (exactness) is broken for item 2: expected 2 uses, got 1; \
EchoSpec(factor=2, buffer=1, order='consecutive', batch_size=1, seed=0), num_items=3
    """
    laws, spec = sorted(set(laws)), completed(spec)
    if unknown := set(laws) - set(range(1, 12)):
        raise ValueError(f"there is no law {sorted(unknown)}; laws are 1 to 11")
    if max_rereads is None:
        max_rereads = spec.buffer + spec.batch_size - 1  # the items still in use
        if isinstance(spec, EchoSpec):
            max_rereads = rounds_of(spec).most_rereads()
    make_item, others = make_item or _recognisable_item, tuple(others)
    trial = Trial(
        make_echo, spec, num_items, make_item, others, read_ahead, max_rereads
    )
    runs = []
    if isinstance(spec, AdaptiveSpec) and spec.replay is None:
        # What the echo decides by itself, with the log of its whole run.
        own = replace(trial, pause_s=0.001).run(states=4 in laws)
        runs = [(replace(trial, spec=replace(spec, replay=own.log)), own)]
        coins = random.Random(spec.seed)
        _, log = plan_run(spec, num_items, lambda: coins.random() < 0.5)
        trial = replace(trial, spec=replace(spec, replay=log))
    runs = [(trial, trial.run()), *runs]
    for law in laws:
        check = CHECKS[law - 1]
        name = f"{law} ({check.__name__.strip('_').replace('_', ' ')})"
        for trial, record in runs:
            check(replace(trial, law=name), record)


def _recognisable_item(index: int) -> dict[str, np.ndarray]:
    """Returns an item whose leaves differ from all other items."""
    payload = np.arange(12, dtype=np.float32).reshape(3, 4) + 100 * index
    return {"index": np.array(index), "payload": payload}
