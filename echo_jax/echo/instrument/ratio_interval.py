"""The interval of R, from measurements in rounds."""

import itertools
import statistics
from collections.abc import Sequence

from echo_jax.echo.instrument.step_times import step_times

__all__ = ["ratio_interval"]

# 97.5 % points of Student's t, by degrees of freedom.
_STUDENT_T = {2: 4.303, 3: 3.182, 4: 2.776}


def ratio_interval(
    ups: Sequence[Sequence[float]], downs: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Returns the 95 % interval of R from seconds per batch and step of each round."""
    # Student's interval over the rounds: times within a round may correlate, such as in
    # bursts and periods; rounds hardly do. It also spans two unknowns: whether slow
    # steps that do not recur are the step's own, and how often slow steps come if few
    # were seen.
    times = step_times(downs)
    low, high = _student(ups, times.mean_s, times.window_means_s)
    if times.slow and not times.slow.recur:
        mean_s = statistics.fmean(itertools.chain.from_iterable(downs))
        counted = _student(ups, mean_s, [statistics.fmean(down) for down in downs])
        low = min(low, counted[0])
    most_s = times.mean_s + times.unseen_s
    least_s = times.mean_s - times.unseen_s
    if times.slow:
        least_s = max(least_s, min(times.mean_s, times.slow.others_s))
    return low * times.mean_s / most_s, high * times.mean_s / least_s


def _student(
    ups: Sequence[Sequence[float]], down_s: float, down_means_s: Sequence[float]
) -> tuple[float, float]:
    ratios = [
        statistics.fmean(up) / mean_s
        for up, mean_s in zip(ups, down_means_s, strict=True)
    ]
    ratio = statistics.fmean(itertools.chain.from_iterable(ups)) / down_s
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    reach = _STUDENT_T[len(ratios) - 1] * error
    return max(ratio - reach, 0.0), ratio + reach
