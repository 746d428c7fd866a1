"""What XLA makes of an update, what that costs, and what it is told."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "flops": ["UpdateFlops", "count_flops", "peak_flops_per_s", "program_flops"],
        "options": ["xla_options"],
        "sent": ["collectives", "sent_bytes"],
    },
)
