"""How starved a trainer is, and how much an echo would gain."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "advice": ["OptionNames"],
        "fresh_time": ["FreshTime", "UNSEEN"],
        "ratio_interval": ["ratio_interval"],
        "step_times": ["step_times"],
        "stopwatch": ["BoundedSteps", "time_calls", "wait_for"],
    },
)
