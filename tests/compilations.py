"""How many programs are compiled, as jax itself counts them."""

import contextlib
import itertools

import jax

import echo_jax as ej
from echo_jax.training.trainer import compile_functions
from echo_jax.workloads import build

_COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def counted_compilations():
    """Gives a list that grows by an entry for every compilation."""
    compiled = []

    def listen(event, seconds, **kwargs):
        if event == _COMPILED:
            compiled.append(kwargs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def compilations_by_update(config, num_updates=5):
    """Returns how many programs were compiled up to the end of each update."""
    # Another test may have compiled the programs of an equal task.
    jax.clear_caches()
    workload = build(config)
    functions = compile_functions(config, workload)
    state = functions.init(functions.init_key)
    spec = ej.EchoSpec(batch_size=config.batch_size)
    counts = []
    with (
        contextlib.closing(iter(workload.train_dataset(spec))) as batches,
        counted_compilations() as compiled,
    ):
        for batch in itertools.islice(batches, num_updates):
            state, report = functions.step_on_batch(state, batch)
            jax.block_until_ready(report)
            counts.append(len(compiled))
    return counts
