"""The fields ``optim.name`` and ``optim.schedule``, where they name optax.

An optimizer or a schedule of optax is found by its public name, and no text is
evaluated. Only a function of `optax` or `optax.contrib` that takes a learning rate and
returns a gradient transformation is accepted as an optimizer. A schedule must return a
learning rate for an update.
"""

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax

from echo_jax.config.optim import OWN_OPTIMIZERS, OWN_SCHEDULES, OptimSpec

_MODULES = {"optax": optax, "optax.contrib": optax.contrib}


def try_optax(optim: OptimSpec) -> None:
    """Refuses an optimizer or a schedule of optax that cannot be used."""
    if optim.name not in OWN_OPTIMIZERS:
        optax_factory(optim.name, optim.args)
    if optim.schedule not in OWN_SCHEDULES:
        optax_schedule(optim.schedule, optim.schedule_args)


# The trial on a matrix refuses optimizers that need more than gradients and parameters,
# or whose model is not its parameters.
def optax_factory(
    name: str, args: str
) -> Callable[[Any], optax.GradientTransformation]:
    """Finds an optimizer of optax, tries it, and returns a function of the rate."""
    found = _function_of_optax(name)
    if found is None or "learning_rate" not in inspect.signature(found).parameters:
        raise ValueError(
            f"config.optim.name={name!r} is no public optimizer of optax; use "
            f"{', '.join(OWN_OPTIMIZERS)}, or a function of optax or optax.contrib "
            "that takes a learning_rate, such as --config.optim.name=optax.lion"
        )
    if found.__name__.startswith("schedule_free"):
        raise ValueError(
            f"config.optim.name={name!r} trains an average that is not saved; use "
            "another optimizer with --config.optim.schedule=warmup_stable_decay"
        )
    kwargs = parse_args(args)
    said = f"config.optim.name={name!r} cannot train with config.optim.args={args!r}"
    with _trying(said):
        jax.eval_shape(lambda rate: _try(found(learning_rate=rate, **kwargs)), 0.5)
    return lambda rate: found(learning_rate=rate, **kwargs)


def optax_schedule(name: str, args: str) -> optax.Schedule:
    """Finds and tries a schedule of optax: updates done to a factor on the rate."""
    found = _function_of_optax(name)
    if found is None or found not in vars(optax.schedules).values():
        raise ValueError(
            f"config.optim.schedule={name!r} is no schedule of optax; use one of "
            f"{', '.join(OWN_SCHEDULES)}, or a schedule of optax, such as "
            "--config.optim.schedule=optax.exponential_decay"
        )
    given = f"config.optim.schedule_args={args!r}"
    said = f"config.optim.schedule={name!r} cannot be made of {given}"
    with _trying(said):
        schedule = found(**parse_args(args, "optim.schedule_args"))
        if jax.eval_shape(schedule, 0).shape != ():
            raise TypeError("it gives no learning rate")
    return schedule


@contextlib.contextmanager
def _trying(said: str) -> Iterator[None]:
    """Turns all errors of a function of optax into a ValueError."""
    try:
        with jax.numpy_dtype_promotion("standard"):  # Many need it.
            yield
    except Exception as error:
        raise ValueError(f"{said}: {error}; change one of the two") from error


def _function_of_optax(name: str) -> Callable[..., Any] | None:
    """Returns the function with a public name in optax, or None."""
    module, _, attribute = name.rpartition(".")
    found = getattr(_MODULES.get(module), attribute, None)
    is_public = inspect.isfunction(found) and not attribute.startswith("_")
    return found if is_public else None


def _try(optimizer: Any) -> Any:
    params = {"matrix": jax.numpy.ones((2, 2))}
    return optimizer.update(params, optimizer.init(params), params)


def parse_args(
    args: str, field: str = "optim.args"
) -> dict[str, bool | int | float | str]:
    """Reads a field that is a JSON object, which flags and sweeps can set."""
    try:
        found = json.loads(args)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or not all(
        isinstance(value, bool | int | float | str) for value in found.values()
    ):
        raise ValueError(
            f"config.{field}={args!r} is no JSON object of numbers, booleans and "
            f"strings; set --config.{field}='{{\"b1\": 0.9}}', or '{{}}' for none"
        )
    return found
