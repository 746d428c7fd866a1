"""Sorts of integers that are several times faster than NumPy's stable argsort."""

import numpy as np

__all__ = ["grouped_argsort", "stable_argsort"]


def stable_argsort(values: np.ndarray) -> np.ndarray:
    """Returns ``np.argsort(values, kind="stable")`` of non-negative integers."""
    # It is several times faster: value and place are sorted as one integer if both fit
    # into 63 bits.
    if values.size == 0:
        return np.zeros(0, np.int64)
    bits = int(values.size - 1).bit_length()
    if int(values.max()).bit_length() + bits > 63:
        return np.argsort(values, kind="stable")
    packed = (values << bits) | np.arange(values.size)
    packed.sort()
    return packed & ((1 << bits) - 1)


def grouped_argsort(group: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Returns an order by group, and at random within a group, ``int64[n]``."""
    # The high bits of the key count, as many as fit beside group and place in 64 bits.
    if group.size == 0:
        return np.zeros(0, np.int64)
    bits = int(key.size - 1).bit_length()
    group_bits = int(group.max()).bit_length()
    packed = (key >> np.uint64(group_bits + bits)) << np.uint64(bits)
    packed |= np.arange(key.size, dtype=np.uint64)
    if group_bits:
        packed |= group.astype(np.uint64) << np.uint64(64 - group_bits)
    packed.sort()
    return (packed & np.uint64((1 << bits) - 1)).view(np.int64)
