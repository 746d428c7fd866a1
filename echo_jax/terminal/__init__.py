"""The output of a command while it runs, and its end."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "countdown": ["Countdown"],
        "failures": ["forget", "quiet_libraries", "sentence"],
        "notes": ["Notes"],
    },
)
