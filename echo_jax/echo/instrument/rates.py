"""Rates: how long updates take, by the model of constant rates.

The model is that of Choi et al. 2019, section 2: an upstream that makes a fresh
batch in t_up and a training step of t_down run in parallel, so that one fresh batch
and its e updates take max(t_up, e t_down) (Eq. 1). It holds for constant rates.
"""

import math

__all__ = [
    "advised_factor",
    "idle_fraction",
    "ratio",
    "seconds_per_fresh",
    "seconds_per_update",
]


def ratio(t_up_s: float, t_down_s: float) -> float:
    """Returns R, the time of a fresh batch divided by the time of a training step.

    Args:
      t_up_s: Seconds per fresh batch upstream.
      t_down_s: Seconds per training step.

    Raises:
      ValueError: One of them is not positive and finite.
    """
    _check_positive(t_up_s=t_up_s, t_down_s=t_down_s)
    return t_up_s / t_down_s


def seconds_per_fresh(t_up_s: float, t_down_s: float, factor: float) -> float:
    """Returns the seconds that a fresh batch and its updates take: max(t_up, e t_down).

    Args:
      t_up_s: Seconds per fresh batch upstream.
      t_down_s: Seconds per training step.
      factor: Updates for each fresh batch, e, at least 1.

    Raises:
      ValueError: A number is out of its range.

    Example:
      >>> seconds_per_fresh(0.4, 0.1, 4), seconds_per_fresh(0.4, 0.1, 5)
      (0.4, 0.5)
    """
    _check_positive(t_up_s=t_up_s, t_down_s=t_down_s)
    if not 1 <= factor < math.inf:
        raise ValueError(f"factor={factor} must be an echo factor, at least 1")
    return max(t_up_s, factor * t_down_s)


def seconds_per_update(t_up_s: float, t_down_s: float, factor: float) -> float:
    """Returns the seconds that an update takes: max(t_up / e, t_down).

    Args:
      t_up_s: Seconds per fresh batch upstream.
      t_down_s: Seconds per training step.
      factor: Updates for each fresh batch, e, at least 1.

    Raises:
      ValueError: A number is out of its range.

    Example:
      >>> [seconds_per_update(0.4, 0.1, factor) for factor in (1, 2, 4, 8)]
      [0.4, 0.2, 0.1, 0.1]
    """
    return seconds_per_fresh(t_up_s, t_down_s, factor) / factor


def idle_fraction(t_up_s: float, t_down_s: float, factor: float = 1) -> float:
    """Returns the share of time in which the accelerator waits for data.

    Without echoing it is 1 - 1/R if R is above 1.

    Args:
      t_up_s: Seconds per fresh batch upstream.
      t_down_s: Seconds per training step.
      factor: Updates for each fresh batch, e, at least 1.

    Raises:
      ValueError: A number is out of its range.

    Example:
      >>> idle_fraction(0.4, 0.1), idle_fraction(0.4, 0.1, 2)
      (0.75, 0.5)
    """
    return 1 - t_down_s / seconds_per_update(t_up_s, t_down_s, factor)


def advised_factor(ratio: float, max_uses: float = 4) -> float:
    """Returns the echo factor to use: R, but at most `max_uses`, at least 1.

    Below R, the updates that echoing adds cost no time. Above R, they slow down fresh
    data. `max_uses` is the number of uses after which a repeat is worth nothing.
    According to Choi et al. 2019 (figure 5) it is about 4 for a Transformer on LM1B at
    batch 1024, and at least 16 at batch 4096. Their own advice, e = R, is wrong for an
    R above it.

    Args:
      ratio: R, seconds per fresh batch over seconds per training step.
      max_uses: The largest factor that is worth its updates, at least 1.

    Raises:
      ValueError: A number is out of its range.

    Example:
      >>> [advised_factor(r) for r in (0.5, 2.6, 9.0)]
      [1.0, 2.6, 4.0]
    """
    _check_positive(ratio=ratio)
    if not max_uses >= 1:
        raise ValueError(f"max_uses={max_uses} must be at least 1")
    return float(max(1, min(ratio, max_uses)))


def _check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be positive and finite")
