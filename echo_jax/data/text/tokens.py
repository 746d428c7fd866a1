"""Windows of tokens, cut from prepared blocks, and what counting alone can predict.

A window holds T + 1 tokens: T that are read, and for each the one to be predicted.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from echo_jax.data.prepare.blocks import token_dtype
from echo_jax.data.sources.entries import DecodeRecord
from echo_jax.data.sources.prepared import Prepared

__all__ = ["DecodeTokens", "TokenWindows", "unigram_nats"]

_COUNTED_AT_ONCE = 1 << 20

_decode_block = DecodeRecord("text")


class TokenWindows:
    """Records of a prepared text: its windows, end to end.

    A block of T' tokens is followed by the first token of the next block. So windows
    overlap by one token, and every token of a split is predicted once, but for the
    very first.

    Args:
      blocks: A split of a prepared text.
      seq_len: T; divides the blocks.

    Raises:
      ValueError: If it does not.

    Example:
      >>> windows = TokenWindows(open_prepared("data/wikitext2", "train"), seq_len=64)
      >>> len(windows[0])  # of 65 tokens in 16 bits
      130
    """

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
    """Stage decode of `TokenWindows`.

    Attributes:
      vocab: Number of tokens.

    Example:
      >>> DecodeTokens(8192)(bytes([7, 0, 0, 1]))["tokens"].tolist()
      [7, 256]
    """

    vocab: int

    def __call__(self, record: bytes) -> dict[str, np.ndarray]:
        """Returns ``{"tokens": uint16[T + 1]}`` (uint32 if need be), read-only."""
        return {"tokens": np.frombuffer(record, token_dtype(self.vocab))}


def unigram_nats(
    train: Iterable[np.ndarray], validation: Iterable[np.ndarray], vocab: int
) -> float:
    """Returns the loss of the model that knows how frequent tokens are, and no more.

    A model above it has learnt less than to count.

    Args:
      train: Tokens that are counted, with one added to each count: no token is
        impossible.
      validation: Tokens that are predicted.
      vocab: Number of tokens.

    Returns:
      Nats per token.

    Example:
      >>> round(unigram_nats([np.array([0, 0, 1])], [np.array([0, 1])], vocab=2), 4)
      0.7136
    """
    seen, predicted = _counts(train, vocab) + 1, _counts(validation, vocab)
    return float(-(predicted * np.log(seen / seen.sum())).sum() / predicted.sum())


def _counts(parts: Iterable[np.ndarray], vocab: int) -> np.ndarray:
    total = np.zeros(vocab, np.int64)
    for part in parts:
        # In pieces: counting takes eight bytes for each token.
        for start in range(0, len(part), _COUNTED_AT_ONCE):
            piece = part[start : start + _COUNTED_AT_ONCE]
            total += np.bincount(piece, minlength=vocab)
    return total
