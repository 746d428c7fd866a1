"""The fields ``optim.name`` and ``optim.schedule``, where they name optax.

An optimizer or a schedule of optax is found by its public name, and no text is
evaluated. It is tried before it is used.
"""

import contextlib
import inspect
import json
from collections.abc import Callable, Collection, Iterator
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
    found = _public_function("optim.name", name, OWN_OPTIMIZERS, "lion")
    if found.__name__.startswith("schedule_free"):
        raise ValueError(
            f"config.optim.name={name!r} trains an average that is not saved; use "
            "another optimizer with --config.optim.schedule=warmup_stable_decay"
        )
    kwargs = parse_args(args)

    def make(rate: Any) -> optax.GradientTransformation:
        return found(learning_rate=rate, **kwargs)

    def train(rate: Any) -> Any:
        optimizer, params = make(rate), {"matrix": jax.numpy.ones((2, 2))}
        return optimizer.update(params, optimizer.init(params), params)

    with _trying(f"name={name!r} cannot train with config.optim.args={args!r}"):
        jax.eval_shape(train, 0.5)
    return make


def optax_schedule(name: str, args: str) -> optax.Schedule:
    """Finds and tries a schedule of optax: updates done to a factor on the rate."""
    found = _public_function("optim.schedule", name, OWN_SCHEDULES, "exponential_decay")
    kwargs = parse_args(args, "optim.schedule_args")
    with _trying(f"schedule={name!r} cannot be made of schedule_args={args!r}"):
        schedule = found(**kwargs)
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
        said = f"config.optim.{said}: {error}; change one of the two"
        raise ValueError(said) from error


def _public_function(
    field: str, name: str, own: Collection[str], example: str
) -> Callable[..., Any]:
    """Returns the function with a public name in optax."""
    module, _, attribute = name.rpartition(".")
    found = getattr(_MODULES.get(module), attribute, None)
    if not inspect.isfunction(found) or attribute.startswith("_"):
        raise ValueError(
            f"config.{field}={name!r} is no public function of optax; use "
            f"{', '.join(own)}, or one of optax: --config.{field}=optax.{example}"
        )
    return found


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
