"""Text on the host: windows of tokens for language models."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "sequences": [
            "choose_group",
            "open_sequences",
            "sample_documents",
            "unigram_nats",
        ]
    },
)
