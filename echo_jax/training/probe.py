"""Measures how long the trainer of a config would wait for data, without training."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any

from echo_jax.config.run import RunSpec
from echo_jax.echo.instrument.advice import OptionNames, ProbeReport
from echo_jax.echo.instrument.measure import probe
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.feeds.feed import JoinedBatches
from echo_jax.training.feeds.loader import measure_loader, unechoed
from echo_jax.training.measure import Rates, held_feed, measure_step
from echo_jax.training.processes.stop import Watchdog
from echo_jax.workloads.base import Batch, Workload

# The maximum number of batches, and of steps; two seconds of each at most.
_MOST_CALLS = 1000


def calibrate(
    config: RunSpec,
    workload: Workload,
    *,
    note: Callable[[str], Any] = lambda line: None,
) -> Rates:
    """Measures the rates of a config on this machine, without training."""
    compiled = CompiledFunctions(config, workload)
    state = compiled.init(compiled.init_key)
    with Watchdog.of_data(config, note) as watchdog:
        loader = measure_loader(workload, config, most=_MOST_CALLS, watchdog=watchdog)
        with closing(held_feed(compiled, config, loader)) as feed:
            t_down_s = measure_step(compiled, state, feed, most=_MOST_CALLS)
    return Rates(loader.t_up_s, t_down_s)


def probe_config(
    config: RunSpec,
    workload: Workload,
    *,
    seconds: float,
    stages: Mapping[str, Callable[[], Any]],
    on_progress: Callable[[str, float], None],
    flag: str = "--config",
) -> ProbeReport:
    """Probes the trainer of a config without an echo; its advice names fields."""
    compiled = CompiledFunctions(config, workload)
    part_done = 0.0

    def show(what: str, done: float | None = None) -> None:
        nonlocal part_done
        part_done = part_done if done is None else done
        on_progress(what, part_done)

    def timed(stage: str) -> Any:
        with watchdog.waiting(f"the stage {stage} of a batch"):
            return stages[stage]()

    with Watchdog.of_data(config, show) as watchdog:
        dataset = workload.train_dataset(unechoed(config))
        return probe(
            _Watched(dataset, watchdog),
            compiled.step_on_batch,
            state=compiled.init(compiled.init_key),
            seconds=seconds,
            max_uses=config.echo.max_uses,
            stages={name: partial(timed, name) for name in stages},
            options=_options(flag),
            on_progress=show,
        )


class _Watched(Iterable[Batch]):
    """The batches of a dataset; the watchdog watches each wait for them."""

    def __init__(self, dataset: Any, watchdog: Watchdog):
        self._dataset, self._watchdog = dataset, watchdog

    def __iter__(self) -> Iterator[Batch]:
        with self._watchdog.closing(JoinedBatches([self._dataset])) as batches:
            what = "a batch, to see how fast they come"
            yield from self._watchdog.each(batches, what)


def _options(flag: str) -> OptionNames:
    return OptionNames(
        threads=f"{flag}.data.threads",
        workers=f"{flag}.data.workers",
        prefetch=f"{flag}.data.prefetch",
        seconds="--seconds",
        worth=f"{flag}.probe_repeats",
        min_uses=f"{flag}.echo.min_uses={{factor}} {flag}.echo.max_uses={{most}}",
        device=f"on the accelerator ({flag}.echo.buffer_on=device)",
        placements=("decode", "augment", "batch"),
        echo=(
            f"{flag}.echo.factor={{factor}} {flag}.echo.stage={{after}} "
            f"{flag}.echo.order=spread {flag}.echo.buffer={{buffer}}"
        ),
    )
