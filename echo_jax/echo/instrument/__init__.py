"""How starved a trainer is, and how much an echo would gain."""

from echo_jax.lazy import door

_MEASURE = ["UNSEEN", "BoundedSteps", "FreshTime", "time_calls", "wait_for"]

__getattr__ = door(
    __name__,
    {
        "advice": ["OptionNames"],
        "measure": _MEASURE,
        "rates": ["contention", "ratio_interval", "step_times"],
    },
)
