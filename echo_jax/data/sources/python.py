"""Examples that a class of the user's own gives, named in a config as `python:`.

Importing runs the module. That is the user's doing, as a config is: nothing but the
config of the run itself may name one, and a run folder's config is refused.
"""

import importlib
from collections.abc import Callable
from typing import Any

from echo_jax.data.sources.foreign_records import ForeignRecords, open_foreign

__all__ = ["PythonData"]


class PythonData:
    """A class ``C`` with random access: ``C(split)[index]`` is the dict of its kind.

    It has ``__len__`` and ``__getitem__``, and an attribute ``splits``, their names;
    for images also ``classes``, and for scenes ``categories``, as
    `echo_jax.data.sources.source.DescribedSource` says. An instance may have
    ``metadata()``, JSON values that say what it read; where it reads in worker
    processes it pickles.

    Attributes:
      splits: The names of its splits.
    """

    def __init__(self, name: str, kind: str):
        """Imports it.

        Args:
          name: ``package.module:Class``.
          kind: What its examples must be.

        Raises:
          ValueError: There is no such class, or it is no class of that form.
        """
        self._source, self._kind = f"python:{name}", kind
        module, _, attribute = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"data.source={self._source!r} cannot be imported ({error}); write "
                "python:package.module:Class, and see that PYTHONPATH leads to it."
            ) from error
        # Asked for before it is called: a class that has them was written for this.
        needed = ["splits", "__len__", "__getitem__", *_ABOUT[kind]]
        missing = [each for each in needed if not hasattr(found, each)]
        if missing or not isinstance(found, type):
            raise ValueError(
                f"data.source={self._source!r} is no class with {', '.join(needed)}"
                + (f": it has no {missing[0]}." if missing else ".")
            )
        self._class: Any = found
        self.splits = [str(split) for split in self._class.splits]

    def open(
        self, split: str
    ) -> tuple[ForeignRecords, Callable[[bytes], dict[str, Any]]]:
        """Returns the records of a split, and what decodes one.

        Args:
          split: One of ``splits``.

        Raises:
          ValueError: Its examples are of another kind.
        """
        examples = self._class(split)
        own = examples.metadata() if hasattr(examples, "metadata") else {}
        return open_foreign(
            examples,
            self._kind,
            splits={name: {} for name in self.splits},
            facts={**own, "source": self._source, "split": split},
            **{name: list(getattr(self._class, name)) for name in _ABOUT[self._kind]},
        )


# What a class must say of its kind of examples.
_ABOUT = {"images": ("classes",), "coco": ("categories",), "text": ()}
