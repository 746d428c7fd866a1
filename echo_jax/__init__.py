"""echo_jax: data echoing for JAX.

This is the library. It has echo stages for any iterator, for Grain (`echo_jax.grain`),
for tf.data (`echo_jax.tfdata`) and in accelerator memory (`echo_jax.device`). The laws
that every echo obeys are in `echo_jax.testing`. `probe` and `echo_jax.rates` measure
whether echoing helps.

The trainer, its workloads and the studies are subpackages.
"""

import importlib
from typing import TYPE_CHECKING, Any

from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.echo import echo, echo_batches
from echo_jax.echo.finite import BadItemError, FiniteIterator, check_finite
from echo_jax.echo.instrument.measure import probe
from echo_jax.echo.instrument.rates import RepeatWorth, mean_worth, worth_of_repeats
from echo_jax.echo.iterator import EchoIterator
from echo_jax.echo.keys import seed_for_use
from echo_jax.echo.schedule import FactorByItem, FetchSchedule
from echo_jax.echo.spec import AdaptiveSpec, EchoSpec, StochasticSpec
from echo_jax.echo.stats import Counts, UseInfo

if TYPE_CHECKING:
    from echo_jax.echo import device
    from echo_jax.echo import laws as testing
    from echo_jax.echo.adapters import grain, tfdata
    from echo_jax.echo.instrument import rates
    from echo_jax.inference.run import load_run

__all__ = [
    "AdaptiveSpec",
    "BadItemError",
    "Counts",
    "DecisionLog",
    "EchoIterator",
    "EchoSpec",
    "FactorByItem",
    "FetchSchedule",
    "FiniteIterator",
    "RepeatWorth",
    "StochasticSpec",
    "UseInfo",
    "check_finite",
    "device",
    "echo",
    "echo_batches",
    "grain",
    "load_run",
    "mean_worth",
    "probe",
    "rates",
    "seed_for_use",
    "testing",
    "tfdata",
    "worth_of_repeats",
]

# Imported at first use: some import jax or TensorFlow.
_LAZY = {
    "device": "echo.device",
    "grain": "echo.adapters.grain",
    "rates": "echo.instrument.rates",
    "testing": "echo.laws",
    "tfdata": "echo.adapters.tfdata",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"echo_jax.{_LAZY[name]}")
    if name == "load_run":
        return importlib.import_module("echo_jax.inference.run").load_run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
