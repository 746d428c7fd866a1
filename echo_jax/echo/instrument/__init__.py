"""How starved a trainer is, and how much an echo would gain."""

from echo_jax.lazy import door

_MEASURE = ["BoundedSteps", "ratio_interval", "step_times", "time_calls", "wait_for"]

__getattr__ = door(
    __name__,
    {
        "advice": ["OptionNames"],
        "fresh_time": ["UNSEEN", "FreshTime"],
        "stopwatch": _MEASURE,
    },
)
