"""A trained model: the part of a training state that is evaluated, saved and used."""

from collections.abc import Mapping
from typing import Any

from flax import struct

__all__ = ["Model"]


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
