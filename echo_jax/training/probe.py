"""Measures how long the trainer of a config would wait for data, without training."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from echo_jax.config import Config
from echo_jax.echo.instrument.advice import OptionNames
from echo_jax.echo.instrument.probe import probe
from echo_jax.echo.instrument.probe_report import ProbeReport
from echo_jax.training.feeds.feed import JoinedBatches
from echo_jax.training.feeds.loader import unechoed
from echo_jax.training.measure import Rates, measure_rates
from echo_jax.training.processes.watchdog import Watchdog
from echo_jax.training.trainer import compile_functions
from echo_jax.workloads.base import Batch, Workload

__all__ = ["calibrate", "probe_config"]

# The maximum number of batches, and of steps; two seconds of each at most.
_MOST_CALLS = 1000


def calibrate(
    config: Config,
    workload: Workload,
    *,
    note: Callable[[str], Any] = lambda line: None,
) -> Rates:
    """Measures the rates of a config on this machine, without training."""
    compiled = compile_functions(config, workload)
    state = compiled.init(compiled.init_key)
    with Watchdog.of_data(config, note) as watchdog:
        how = {"most": _MOST_CALLS, "watchdog": watchdog}
        return measure_rates(compiled, state, workload, config, **how)


def probe_config(
    config: Config,
    workload: Workload,
    *,
    seconds: float,
    stages: Mapping[str, Callable[[], Any]],
    on_progress: Callable[[str, float], None],
    flag: str = "--config",
) -> ProbeReport:
    """Probes the trainer of a config without an echo; its advice names fields."""
    compiled = compile_functions(config, workload)
    part_done = [0.0]

    def show(what: str, done: float) -> None:
        part_done[0] = done
        on_progress(what, done)

    def note(line: str) -> None:
        on_progress(line, part_done[0])

    with Watchdog.of_data(config, note) as watchdog:
        dataset = workload.train_dataset(unechoed(config))
        return probe(
            _WatchedBatches(dataset, watchdog),
            compiled.step_on_batch,
            state=compiled.init(compiled.init_key),
            seconds=seconds,
            cap=config.echo.cap,
            stages={
                name: partial(_watched, call, f"the stage {name} of a batch", watchdog)
                for name, call in stages.items()
            },
            options=_options(flag),
            on_progress=show,
        )


def _watched(call: Callable[[], Any], what: str, watchdog: Watchdog) -> Any:
    with watchdog.waiting(what):
        return call()


class _WatchedBatches(Iterable[Batch]):
    """The batches of a dataset; the watchdog watches each wait for them."""

    def __init__(self, dataset: Any, watchdog: Watchdog):
        self._dataset, self._watchdog = dataset, watchdog

    def __iter__(self) -> Iterator[Batch]:
        with self._watchdog.closing(JoinedBatches([self._dataset])) as batches:
            yield from self._watchdog.each(
                batches, "a batch, to see how fast they come"
            )


def _options(flag: str) -> OptionNames:
    """Returns the names of the settings, as flags that begin with `flag`."""
    return OptionNames(
        threads=f"{flag}.data.threads",
        workers=f"{flag}.data.workers",
        prefetch=f"{flag}.data.prefetch",
        seconds="--seconds",
        worth=f"{flag}.probe_repeats",
        device=f"on the accelerator ({flag}.echo.where=device)",
        placements=("decode", "augment", "batch"),
        echo=(
            f"{flag}.echo.factor={{factor}} {flag}.echo.after={{after}} "
            f"{flag}.echo.order=spread {flag}.echo.buffer={{buffer}}"
        ),
    )
