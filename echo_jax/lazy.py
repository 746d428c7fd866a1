"""Package doors whose names are imported from their modules at first use."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def door(package: str, modules: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a package.

    Args:
      package: ``__name__`` of the package.
      modules: The names that each module of the package gives.

    Example, in ``echo_jax/echo/plans/__init__.py``::

      __getattr__ = door(__name__, {"fixed": ["FixedPlan"], "base": ["Need", "Plan"]})
    """
    where = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{where[name]}"), name)

    return find
