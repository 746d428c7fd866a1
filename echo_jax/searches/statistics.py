"""Intervals and other statistics of trials: pure functions of arrays."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

__all__ = ["Interval", "expected_best", "mean_interval", "relative_seconds"]

_RESAMPLES = 4999


class Interval(NamedTuple):
    """An estimate, and where the true value lies with 95 % confidence.

    Attributes:
      value: The estimate.
      low: The lower end; NaN if there is only one number.
      high: The upper end.
    """

    value: float
    low: float
    high: float

    def exp(self) -> "Interval":
        """Returns the interval of a ratio from that of its logarithm."""
        return Interval(*(math.exp(x) for x in self))


def mean_interval(
    differences: Sequence[Sequence[float]] | np.ndarray, *, confidence: float = 0.95
) -> Interval:
    """Returns the mean of paired differences, with a bootstrap interval.

    Searches and streams are resampled independently of each other, since every search's
    best point is trained on every stream (Owen 2007, "The pigeonhole bootstrap"). The
    ends are those of BCa (Efron 1987), by `scipy.stats.bootstrap`. But resamples of few
    numbers reach little further than these: of three searches that differ by more than
    their streams do, such an interval holds the truth nine times in ten. So it is
    stretched from the mean, until it is as long as Student's interval; how much of it
    lies on which side stays that of BCa.

    Student's interval of two random factors adds the squares of two half-lengths, each
    with the degrees of freedom of its own factor; such a sum holds the truth at least
    as often as it says, whatever the variances are (Banerjee 1960). One is that of the
    means of the searches, in which chance is, too, and it is no shorter than chance
    alone would have it, for three means may agree by luck; the other that of the
    streams, without chance. With the degrees of freedom of Satterthwaite's rule it
    would be too short wherever three searches happen to agree. The price is up to 98 %
    in place of 95 where searches do not differ more than streams.

    Args:
      differences: ``[searches, streams]``, such as log ratios of an arm's costs to the
        baseline's.
      confidence: How often such an interval holds the true mean.

    Returns:
      The mean with its interval. The same for the same numbers.

    Example:
      >>> found = mean_interval([[0.1, 0.2, 0.3], [0.2, 0.3, 0.4]])
      >>> round(found.value, 6), found.low < 0.25 < found.high
      (0.25, True)
    """
    table = np.asarray(differences, float)
    mean = float(table.mean())
    if table.size < 2:
        return Interval(mean, math.nan, math.nan)
    if np.ptp(table) == 0:
        return Interval(mean, mean, mean)
    apart = (table - mean) / np.ptp(table)

    def statistic(*picks: np.ndarray, axis: int = -1) -> np.ndarray:
        rows, columns = _both(apart, picks)
        means = apart[rows[..., :, None], columns[..., None, :]].mean(axis=(-1, -2))
        # BCa counts those below the mean, which no rounding error should decide.
        return means.round(9)

    # An axis of one cannot be resampled.
    axes = tuple(np.arange(n) for n in table.shape if n > 1)
    found = stats.bootstrap(
        axes,
        statistic,
        n_resamples=_RESAMPLES,
        batch=500,
        vectorized=True,
        confidence_level=confidence,
        method="BCa",
        rng=np.random.default_rng(0),
    )
    low, high = map(float, found.confidence_interval)
    stretch = 2 * _half_length(table, confidence) / (high - low)
    return Interval(mean, mean + stretch * low, mean + stretch * high)


def _both(
    table: np.ndarray, picks: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the picked rows and columns; of an axis of one, that one."""
    picks = tuple(np.asarray(pick, int) for pick in picks)
    if len(picks) == 2:
        return picks[0], picks[1]
    one = np.zeros((*picks[0].shape[:-1], 1), int)
    return (picks[0], one) if table.shape[1] == 1 else (one, picks[0])


def _half_length(table: np.ndarray, confidence: float) -> float:
    """Half the length of Student's interval of the mean of a table."""

    def square(variance: float, n: int, free: int) -> float:
        factor = float(stats.t.ppf(0.5 + confidence / 2, free))
        return factor**2 * variance / n

    n = table.size
    if 1 in table.shape:
        return math.sqrt(square(table.var(ddof=1), n, n - 1))
    searches, streams = table.shape
    by_search, by_stream = table.mean(axis=1), table.mean(axis=0)
    rest = table - by_search[:, None] - by_stream + table.mean()
    free = (searches - 1) * (streams - 1)
    chance = (rest**2).sum() / free
    of_searches = square(by_search.var(ddof=1), searches, searches - 1)
    of_streams = max(by_stream.var(ddof=1) - chance / searches, 0.0)
    return math.sqrt(
        max(of_searches, square(chance, n, free))
        + square(of_streams, streams, streams - 1)
    )


def expected_best(scores: Sequence[float | None], k: int) -> float | None:
    """Returns the mean of the best of k trials that are drawn from those of a search.

    It says what a search of a smaller budget would have found (Dodge et al. 2019), here
    without putting trials back, so that it is exact for these trials.

    Args:
      scores: Of all trials, the less the better; None where one did not get there.
      k: How many are drawn, at most all.

    Returns:
      The mean over draws that hold one that got there; None if none does.

    Example:
      >>> expected_best([1.0, 2.0, 3.0], 2)
      1.3333333333333333
    """
    found = sorted(score for score in scores if score is not None)
    total = len(scores)
    if not 1 <= k <= total:
        raise ValueError(f"k={k} must be between 1 and the {total} trials")
    # How likely the i-th best is drawn, and none better.
    chances = [math.comb(total - 1 - i, k - 1) for i in range(len(found))]
    if not sum(chances):
        return None
    return sum(c * s for c, s in zip(chances, found, strict=True)) / sum(chances)


def relative_seconds(
    fresh: float, updates: float, *, batch_size: int, ratio: float
) -> float:
    """Returns how long a training takes, in steps, from its counts.

    Loader and accelerator work at the same time: whichever has more to do decides
    (Choi et al. 2019, equation 1).

    Args:
      fresh: Fresh examples that are read.
      updates: Steps that are made.
      batch_size: Examples of a batch.
      ratio: R, the steps that a fresh batch takes.

    Example:
      >>> relative_seconds(3200, 200, batch_size=32, ratio=4)
      400.0
    """
    return max(fresh / batch_size * ratio, float(updates))
