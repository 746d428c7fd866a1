"""Randomness from counters: the same on every machine and backend.

A value depends on a seed and on integers that name its purpose, never on a generator's
hidden state. So nothing has to be saved, and worker count and timing change nothing.
The mixer is the finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast Splittable
Pseudorandom Number Generators").
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import overload

import numpy as np

Indices = np.ndarray | Sequence[int]
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
# Made once: for a batch of a few items making them took as long as the arithmetic.
_SCALARS = {n: np.uint64(n) for n in (_GOLDEN, _FIRST, _SECOND, 27, 30, 31)}


def mix(start: int, counter: np.ndarray) -> np.ndarray:
    """Returns well-mixed ``uint64`` of a counter, non-negative integers."""
    z = counter.astype(np.uint64)
    z *= _SCALARS[_GOLDEN]
    z += np.uint64((start + _GOLDEN) & _MASK)
    z ^= z >> _SCALARS[30]
    z *= _SCALARS[_FIRST]
    z ^= z >> _SCALARS[27]
    z *= _SCALARS[_SECOND]
    z ^= z >> _SCALARS[31]
    return z


def _mix_int(start: int, counter: int) -> int:
    """Returns `mix` of one value, ten times as fast as for an array of one."""
    z = (counter * _GOLDEN + start + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def sequence(*parts: int) -> int:
    """Returns the ``start``, for `mix`, of the sequence that some integers name."""
    return functools.reduce(_mix_int, parts, 0)


@overload
def seed_for_use(seed: int, fresh_index: int, repeat: int) -> np.uint64: ...


@overload
def seed_for_use(seed: int, fresh_index: Indices, repeat: Indices) -> np.ndarray: ...


def seed_for_use(
    seed: int, fresh_index: int | Indices, repeat: int | Indices
) -> np.ndarray | np.uint64:
    """Returns the random seed of a use, which its augmentation must use.

    Args:
      seed: The run's seed.
      fresh_index: Index of the fresh item, non-negative, any shape.
      repeat: Number of the use of the item, non-negative, of the same shape.

    Returns:
      ``uint64`` of that shape; different for every use of every item.

    Example:
      >>> import numpy as np
      >>> rng = np.random.Generator(np.random.Philox(int(seed_for_use(0, 41, 2))))
    """
    if isinstance(fresh_index, int) and isinstance(repeat, int):
        return np.uint64(_mix_int(0, _mix_int(sequence(seed), fresh_index) + repeat))
    item = mix(sequence(seed), np.atleast_1d(fresh_index))
    item += np.asarray(repeat, np.uint64)
    return mix(0, item).reshape(np.shape(fresh_index))


def fingerprint(*parts: object) -> int:
    """Returns an integer below 2^48 of objects that their ``repr`` describes."""
    return int(hashlib.sha256(repr(parts).encode()).hexdigest()[:12], 16)
