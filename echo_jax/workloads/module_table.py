"""A model's modules as a table, to be read by people."""

import flax.linen as nn
import jax
import numpy as np

__all__ = ["module_table"]

# Wide enough for the longest row; no table is wider than it needs.
_WIDTH = 400


def module_table(module: nn.Module, inputs: np.ndarray) -> str:
    """Returns Flax's table of a module: paths, shapes and numbers of parameters.

    The module is traced, and nothing is compiled.

    Args:
      module: Called with the inputs and ``train=False``.
      inputs: Of one example.

    Example:
      >>> model = ResNet(num_classes=8, depth=8, width=8)
      >>> table = module_table(model, np.zeros((1, 32, 32, 3), np.float32))
      >>> "stage_0_block_0" in table and "Total Parameters: " in table
      True
    """
    made = module.tabulate(
        jax.random.key(0),
        inputs,
        train=False,
        console_kwargs={"width": _WIDTH, "force_terminal": False},
    )
    return "\n".join(line.strip() for line in made.strip().split("\n")) + "\n"
