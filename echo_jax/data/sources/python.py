"""Examples from a user's own class, named in a config as ``python:``.

Importing the class runs its module. Only the config of the run itself may name one; the
config in a run folder is refused.
"""

import importlib
from typing import Any

from echo_jax.data.sources.foreign_records import Opened, open_foreign


class PythonData:
    """A user's class with random access: ``C(split)[index]`` is the dict of its kind.

    The class has ``__len__``, ``__getitem__`` and ``splits``, the names of the splits,
    for images also ``classes``, and for scenes ``categories`` (see `DescribedSource`).
    ``metadata()`` is optional and returns JSON values. Worker processes need pickling.
    """

    def __init__(self, name: str, kind: str):
        """Imports ``package.module:Class``."""
        self._source, self._kind = f"python:{name}", kind
        module, _, attribute = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"data.source={self._source!r} cannot be imported ({error}); write "
                "python:package.module:Class, and see that PYTHONPATH leads to it."
            ) from error
        # Check the class before the call: one with these attributes was made for this.
        needed = ["splits", "__len__", "__getitem__", *_ABOUT[kind]]
        missing = [each for each in needed if not hasattr(found, each)]
        if missing or not isinstance(found, type):
            raise ValueError(
                f"data.source={self._source!r} is no class with {', '.join(needed)}"
                + (f": it has no {missing[0]}." if missing else ".")
            )
        self._class: Any = found
        self.splits = [str(split) for split in self._class.splits]

    def open(self, split: str) -> Opened:
        """Returns the records of a split, and their decoder."""
        examples = self._class(split)
        own = examples.metadata() if hasattr(examples, "metadata") else {}
        return open_foreign(
            examples,
            self._kind,
            splits={name: {} for name in self.splits},
            facts={**own, "source": self._source, "split": split},
            **{name: list(getattr(self._class, name)) for name in _ABOUT[self._kind]},
        )


# The attribute that a class needs for its kind of examples.
_ABOUT = {"images": ("classes",), "coco": ("categories",), "text": ()}
