"""Convolution and normalisation as their definitions say, in float64."""

import numpy as np


def conv(x, kernel, stride=1):
    """A convolution with windows centred on the pixels, padded by zeros.

    Args:
      x: ``[B, H, W, C]``.
      kernel: ``[k, k, C, D]``, k odd.
      stride: Every how many pixels there is a window, from the first on.

    Returns:
      ``[B, ceil(H / stride), ceil(W / stride), D]``.
    """
    size = kernel.shape[0]
    reach = size // 2
    x = np.pad(x.astype(np.float64), ((0, 0), (reach, reach), (reach, reach), (0, 0)))
    height, width = x.shape[1] - 2 * reach, x.shape[2] - 2 * reach
    rows = []
    for top in range(0, height, stride):
        row = []
        for left in range(0, width, stride):
            window = x[:, top : top + size, left : left + size]
            row.append(np.einsum("bhwc,hwcd->bd", window, kernel))
        rows.append(np.stack(row, axis=1))
    return np.stack(rows, axis=1)


def normalise(x, params, stats, epsilon=1e-5):
    """Batch norm with running statistics."""
    normal = (x - stats["mean"]) / np.sqrt(stats["var"] + epsilon)
    return normal * params["scale"] + params["bias"]


def relu(x):
    return np.maximum(x, 0)


def randomised(tree, seed=0):
    """Variables of the same shapes whose every number matters; variances positive."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        value = rng.normal(size=leaf.shape)
        return (np.exp(value) if "var" in path else value).astype(np.float32)

    def walk(node, path):
        if isinstance(node, dict):
            return {name: walk(child, (*path, name)) for name, child in node.items()}
        return draw(path, node)

    return walk(tree, ())
