"""The config fields ``optim.name`` and ``optim.args``, where they name optax.

An optimizer of optax is taken by its public name and nothing is evaluated: what is
no function of `optax` or `optax.contrib` that takes a learning rate and returns a
transformation of gradients is refused.
"""

import inspect
import json
from collections.abc import Callable
from typing import Any

import jax
import optax

__all__ = ["OWN_OPTIMIZERS", "OptaxFactory", "optax_factory", "parse_args"]

OWN_OPTIMIZERS = ("adamw", "sgd")
"""Names that stand for optimizers with fields of their own under ``optim``."""

OptaxFactory = Callable[[Any], optax.GradientTransformation]
"""Makes an optimizer for a learning rate, a number or a traced array."""

_MODULES = {"optax": optax, "optax.contrib": optax.contrib}


def optax_factory(name: str, args: str) -> OptaxFactory:
    """Finds an optimizer of optax, and tries it on a matrix.

    Args:
      name: ``"optax.NAME"`` or ``"optax.contrib.NAME"``.
      args: Further keyword arguments; see `parse_args`.

    Returns:
      The optimizer as a function of its learning rate alone.

    Raises:
      ValueError: There is no such optimizer, it does not take these arguments, or it
        needs more than gradients and parameters.

    Example:
      >>> optimizer = optax_factory("optax.lion", '{"b1": 0.95}')(1e-4)
      >>> isinstance(optimizer, optax.GradientTransformation)
      True
    """
    module, _, attribute = name.rpartition(".")
    found = None
    if not attribute.startswith("_"):
        found = getattr(_MODULES.get(module), attribute, None)
    if not inspect.isfunction(found) or (
        "learning_rate" not in inspect.signature(found).parameters
    ):
        raise ValueError(
            f"config.optim.name={name!r} is no public optimizer of optax; use adamw, "
            "sgd, or a function of optax or optax.contrib that takes a learning_rate, "
            "such as --config.optim.name=optax.lion"
        )
    kwargs = parse_args(args)

    def make(learning_rate: Any) -> optax.GradientTransformation:
        return found(learning_rate=learning_rate, **kwargs)

    try:
        jax.eval_shape(lambda rate: _try(make(rate)), 0.5)
    except Exception as error:
        raise ValueError(
            f"config.optim.name={name!r} cannot train with config.optim.args={args!r}: "
            f"{error}; change the arguments, or use another optimizer"
        ) from error
    return make


def _try(optimizer: Any) -> Any:
    params = {"matrix": jax.numpy.ones((2, 2))}
    return optimizer.update(params, optimizer.init(params), params)


def parse_args(args: str) -> dict[str, bool | int | float | str]:
    """Reads ``optim.args``, which is JSON so that flags and sweeps can set it.

    Args:
      args: An object of numbers, booleans and strings.

    Raises:
      ValueError: It is anything else, or sets the learning rate.

    Example:
      >>> parse_args('{"b1": 0.95, "nesterov": true}')
      {'b1': 0.95, 'nesterov': True}
    """
    try:
        found = json.loads(args)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or not all(
        isinstance(value, bool | int | float | str) for value in found.values()
    ):
        raise ValueError(
            f"config.optim.args={args!r} is no JSON object of numbers, booleans and "
            "strings; set --config.optim.args='{\"b1\": 0.9}', or '{}' for none"
        )
    if "learning_rate" in found:
        raise ValueError(
            f"config.optim.args={args!r} sets the learning rate; use config.optim.lr "
            "and config.optim.schedule for it"
        )
    return found
