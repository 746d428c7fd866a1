"""Windows of tokens from prepared blocks, and the loss of a unigram model.

A window holds T + 1 tokens: T inputs, and for each the token to predict.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from echo_jax.data.prepare.tokenizer import token_dtype
from echo_jax.data.sources.foreign_records import DecodeRecord
from echo_jax.data.sources.prepared import Prepared

__all__ = ["DecodeTokens", "TokenWindows", "unigram_nats"]

_COUNTED_AT_ONCE = 1 << 20

_decode_block = DecodeRecord("text")


# A block of T' tokens is followed by the first token of the next block. So windows
# overlap by one token, and every token but the first is predicted once.
class TokenWindows:
    """The windows of a prepared text, end to end; `seq_len` divides its blocks."""

    def __init__(self, blocks: Prepared, seq_len: int):
        block = blocks.info["block"]
        if block % seq_len:
            known = [str(n) for n in range(8, block + 1) if block % n == 0]
            raise ValueError(
                f"model.seq_len={seq_len} does not divide the blocks of {block} tokens "
                f"of {str(blocks.folder)!r}; use one of {', '.join(known)}, or prepare "
                "it with another --block."
            )
        self._blocks = blocks
        self._each = block // seq_len
        size = token_dtype(blocks.info["vocab_size"]).itemsize
        self._stride, self._length = seq_len * size, (seq_len + 1) * size

    def __len__(self) -> int:
        return len(self._blocks) * self._each

    def __getitem__(self, index: int) -> bytes:
        block, window = divmod(index, self._each)
        tokens = _decode_block(self._blocks[block])["tokens"]
        start = window * self._stride
        return tokens[start : start + self._length]


@dataclass(frozen=True)
class DecodeTokens:
    """Returns ``{"tokens": uint16[T + 1]}`` (or uint32) of a window, read-only."""

    vocab: int

    def __call__(self, record: bytes) -> dict[str, np.ndarray]:
        return {"tokens": np.frombuffer(record, token_dtype(self.vocab))}


def unigram_nats(
    train: Iterable[np.ndarray], validation: Iterable[np.ndarray], vocab: int
) -> float:
    """Returns the loss of a unigram model of `train`, in nats per token."""
    # Every count is at least 1, so that no token is impossible.
    seen, predicted = _counts(train, vocab) + 1, _counts(validation, vocab)
    return float(-(predicted * np.log(seen / seen.sum())).sum() / predicted.sum())


def _counts(parts: Iterable[np.ndarray], vocab: int) -> np.ndarray:
    total = np.zeros(vocab, np.int64)
    for part in parts:
        # Count in pieces: bincount takes eight bytes for each token.
        for start in range(0, len(part), _COUNTED_AT_ONCE):
            piece = part[start : start + _COUNTED_AT_ONCE]
            total += np.bincount(piece, minlength=vocab)
    return total
