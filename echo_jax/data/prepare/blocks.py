"""Turns a stream of documents into blocks of token ids, from any point in it."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from echo_jax.data.prepare.documents import Piece
from echo_jax.data.prepare.parallel import ordered_map
from echo_jax.data.prepare.tokenizer import Tokenizer
from echo_jax.data.sources.prepared import pack

__all__ = ["BlockStream", "token_dtype"]


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the type of stored ids, little-endian."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class BlockStream:
    """Cuts the tokens of documents into blocks, which overlap by one token.

    Block k has the tokens from ``k * block`` to ``(k + 1) * block`` inclusive.

    Attributes:
      tokens: Number of tokens so far, with the tokens that end documents.
      bytes: Bytes of the files so far, with those between documents.
    """

    def __init__(
        self,
        pieces: Iterator[Piece],
        tokenizer: Tokenizer,
        block: int,
        workers: int,
        note: dict[str, Any] | None,
    ):
        self._tokenizer, self._block = tokenizer, block
        self._dtype = token_dtype(tokenizer.vocab_size)
        note = note or {
            "rest": "",
            "pieces": 0,
            "documents": 0,
            "tokens": 0,
            "bytes": 0,
        }
        # The last token of the latest block, and later tokens.
        self._rest = np.frombuffer(bytes.fromhex(note["rest"]), self._dtype)
        self._pieces = note["pieces"]
        self.documents, self.tokens = note["documents"], note["tokens"]
        self.bytes = note["bytes"]
        self.is_done = False
        self._encoded = ordered_map(
            self._encode,
            itertools.islice(pieces, self._pieces, None),
            num_bytes=lambda piece: len(piece.text),
            workers=workers,
        )
        self._fill()

    def blocks(self, number: int) -> Iterator[bytes]:
        """Yields the records of the next `number` blocks, or of the remaining ones."""
        for _ in range(number):
            if self.is_done:
                return
            yield pack({"tokens": self._rest[: self._block + 1].tobytes()})
            self._rest = self._rest[self._block :]
            self._fill()

    def note(self) -> dict[str, Any]:
        """Returns the JSON values that a stream needs to continue from here."""
        return {
            "rest": self._rest.tobytes().hex(),
            "pieces": self._pieces,
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
        }

    def close(self) -> None:
        """Stops the threads."""
        self._encoded.close()

    def _fill(self) -> None:
        """Takes pieces until there is a block."""
        parts = [self._rest]
        size = len(self._rest)
        while size <= self._block:
            if (found := next(self._encoded, None)) is None:
                self.is_done = True
                break
            tokens, num_bytes, ends = found
            parts.append(tokens)
            size += len(tokens)
            self._pieces += 1
            self.documents += ends
            self.tokens += len(tokens)
            self.bytes += num_bytes
        if len(parts) > 1:
            self._rest = np.concatenate(parts)

    def _encode(self, piece: Piece) -> tuple[np.ndarray, int, bool]:
        """Returns the ids of a piece, its bytes, and whether it ends a document."""
        tokens = self._tokenizer.encode(piece.text)
        if piece.ends:
            tokens = np.append(tokens, self._tokenizer.eod)
        return tokens.astype(self._dtype), piece.bytes, piece.ends
