"""Groups of updates: several updates in one dispatch, by ``lax.scan``.

Starting a program costs tens of microseconds, or more with many arrays. Where a model
computes its update in less time, ``dispatch.steps`` updates in one program share the
cost. On a CPU, a convolution inside a scan ran 19 times slower than outside it.

To the host a group of updates is one update: it cannot evaluate, save or log inside a
group. Groups start at multiples of their size. Updates around which no whole group
fits are dispatched one by one. So the groups of a run do not depend on where it was
stopped.
"""

from collections.abc import Sequence

from echo_jax.config import Config

__all__ = ["log_stops", "next_group"]


def next_group(done: int, steps: int, *, total: int, stops: Sequence[int]) -> int:
    """Returns how many updates to dispatch next: `steps` of them, or 1."""
    # The host needs the state at every multiple of each stop; 0 is never.
    end = done + steps
    if done % steps or end > total:
        return 1
    inside = any(every and (end - 1) // every > done // every for every in stops)
    return 1 if inside else steps


def log_stops(config: Config) -> tuple[int, ...]:
    """Returns the intervals, in updates, after which the host needs the state."""
    return config.log_every, config.eval_every, config.checkpoint_every
