"""A trained model: the part of a training state that is evaluated, saved and used."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from flax import struct

__all__ = ["Model", "size_of"]


# Parts of a model that are named by their size.
_MOST_NAMED = 4


class Model(struct.PyTreeNode):
    """A state without what training alone needs.

    Attributes:
      params: The parameters.
      model_state: The collections other than them.
    """

    params: Any
    model_state: Any

    @classmethod
    def of(cls, variables: Mapping[str, Any]) -> "Model":
        """Returns the model of a task's variables."""
        others = {name: x for name, x in variables.items() if name != "params"}
        return cls(variables["params"], others)

    @property
    def variables(self) -> dict[str, Any]:
        """All collections, as a task takes them."""
        return {"params": self.params, **self.model_state}


def size_of(params: Any) -> str:
    """Returns how many parameters a model has, and where the most of them are.

    Args:
      params: Nested dicts of arrays, or of their shapes.

    Example:
      >>> size_of({"head": {"kernel": jnp.ones((300, 10))}, "bias": jnp.ones(10)})
      '3,010 parameters in 2 arrays: head 3,000, bias 10'
    """
    leaves = jax.tree.leaves_with_path(params)
    parts: dict[str, int] = {}
    for path, array in leaves:
        part = jax.tree_util.keystr(path[:1], simple=True)
        parts[part] = parts.get(part, 0) + math.prod(array.shape)
    largest = sorted(parts, key=lambda part: -parts[part])[:_MOST_NAMED]
    named = ", ".join(f"{part} {parts[part]:,}" for part in largest)
    rest = len(parts) - len(largest)
    more = f" and {rest} more" if rest else ""
    total = sum(parts.values())
    return f"{total:,} parameters in {len(leaves)} arrays: {named}{more}"
