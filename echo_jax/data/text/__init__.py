"""Text on the host: windows of tokens for language models."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "packing": ["choose_group", "sample_documents"],
        "sequences": ["open_sequences", "unigram_nats"],
    },
)
