"""XLA's program of an update: its options, its operations, and the bytes it sends."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "flops": [
            "UpdateFlops",
            "collectives",
            "count_flops",
            "peak_flops_per_s",
            "program_flops",
            "sent_bytes",
        ],
        "options": ["xla_options"],
    },
)
