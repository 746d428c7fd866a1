"""Formats a model's modules as a table for readers."""

import flax.linen as nn
import jax
import numpy as np

__all__ = ["module_table"]

# Wide enough for the longest row; a table is only as wide as it needs.
_WIDTH = 400


def module_table(module: nn.Module, inputs: np.ndarray) -> str:
    """Returns Flax's table of a module, which is traced but not compiled."""
    made = module.tabulate(
        jax.random.key(0),
        inputs,
        train=False,
        console_kwargs={"width": _WIDTH, "force_terminal": False},
    )
    return "\n".join(line.strip() for line in made.strip().split("\n")) + "\n"
