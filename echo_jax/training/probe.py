"""How starved the trainer of a config would be, measured without training it."""

from collections.abc import Callable, Mapping
from typing import Any

from echo_jax.config import Config
from echo_jax.echo.instrument.advice import OptionNames
from echo_jax.echo.instrument.probe import probe
from echo_jax.echo.instrument.probe_report import ProbeReport
from echo_jax.training.measure import Rates, measure_rates, unechoed
from echo_jax.training.trainer import compile_functions
from echo_jax.workloads.base import Workload

__all__ = ["calibrate", "probe_config"]

# Batches, and steps; two seconds of each at most.
_MOST_CALLS = 1000


def calibrate(config: Config, workload: Workload) -> Rates:
    """Measures the rates of a config without training it.

    Args:
      config: A checked training config.
      workload: Made from this config.

    Returns:
      The rates on this machine, now.
    """
    compiled = compile_functions(config, workload)
    state = compiled.init(compiled.init_key)
    return measure_rates(compiled, state, workload, config, most=_MOST_CALLS)


def probe_config(
    config: Config,
    workload: Workload,
    *,
    seconds: float,
    stages: Mapping[str, Callable[[], Any]],
    on_progress: Callable[[str, float], None],
    flag: str = "--config",
) -> ProbeReport:
    """Probes a trainer of this project: what its config makes, without an echo.

    Args:
      config: A checked training config.
      workload: Made from this config.
      seconds: See `echo_jax.echo.instrument.probe.probe`, here and below.
      stages: What the pipeline does for a batch.
      on_progress: Called with what is measured next.
      flag: Begins the flags of the config's fields, as they are typed.

    Returns:
      The report; its advice names fields of the config.
    """
    compiled = compile_functions(config, workload)
    return probe(
        workload.train_dataset(unechoed(config)),
        compiled.step_on_batch,
        state=compiled.init(compiled.init_key),
        seconds=seconds,
        cap=config.echo.cap,
        stages=stages,
        options=_options(flag),
        on_progress=on_progress,
    )


def _options(flag: str) -> OptionNames:
    """Returns what the settings are called where the fields' flags begin so."""
    return OptionNames(
        threads=f"{flag}.data.threads",
        workers=f"{flag}.data.workers",
        prefetch=f"{flag}.data.prefetch",
        seconds="--seconds",
        device=f"on the accelerator ({flag}.echo.where=device)",
        placements=("decode", "augment", "batch"),
        echo=(
            f"{flag}.echo.factor={{factor}} {flag}.echo.after={{after}} "
            f"{flag}.echo.order=spread {flag}.echo.buffer={{buffer}}"
        ),
    )
