"""How starved a trainer is, and how much an echo would gain."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__, {"advice": ["OptionNames"], "rates": ["ratio_interval", "step_times"]}
)
