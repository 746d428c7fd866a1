"""The processes of a run: identity, common decisions, signals and waits."""

from echo_jax.lazy import door

__getattr__ = door(__name__, {"distributed": ["connected"], "stop": ["Watchdog"]})
