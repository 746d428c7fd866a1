"""How many programs are compiled, as jax itself counts them."""

import contextlib

import jax

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
