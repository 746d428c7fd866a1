"""Documents packed into sequences: tokenised when read, several in one window.

The token that ends a document also begins the next one. So a model that sees it as the
start of a document predicts every token of that, its end included, from nothing else.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from echo_jax.data.pipeline.evaluation import sample_indices
from echo_jax.data.pipeline.stages import RecordSource
from echo_jax.data.prepare.blocks import token_dtype
from echo_jax.data.prepare.tokenizer import Tokenizer

__all__ = [
    "Fit",
    "GroupedRecords",
    "PackDocuments",
    "choose_group",
    "document_text",
    "sample_documents",
]

# Of a sample of records, for how many are put into one sequence.
_SAMPLE_RECORDS = 2000
_MOST_GROUPED = 64
# How many of the tokens may be cut off for the rest of a sequence to be used.
_MOST_CUT = 0.05


class GroupedRecords:
    """Records of which each is several neighbours of a source.

    Which ones is decided by their index alone, so that shuffling, workers and a
    restore are as exact as for single records. What is left at the end is dropped.

    Args:
      source: Single records.
      size: How many of them one record is.

    Example:
      >>> records = GroupedRecords([b"a", b"b", b"c"], size=2)
      >>> len(records), msgpack.unpackb(records[0])
      (1, [b'a', b'b'])
    """

    def __init__(self, source: RecordSource, size: int):
        self._source, self._size = source, size

    def __len__(self) -> int:
        return len(self._source) // self._size

    def __getitem__(self, index: int) -> bytes:
        first = index * self._size
        packed = msgpack.packb([self._source[first + i] for i in range(self._size)])
        assert packed is not None
        return packed


@dataclass(frozen=True)
class PackDocuments:
    """Stage decode of `GroupedRecords`: their documents, one after another.

    Attributes:
      decode_record: Turns a single record into ``{"text": bytes}``.
      tokenizer: Turns that into tokens.
      seq_len: T.

    Example:
      >>> pack = PackDocuments(lambda record: {"text": record}, ByteTokenizer(), 5)
      >>> item = pack(msgpack.packb([b"a", b"b"]))
      >>> item["tokens"].tolist(), int(item["length"])
      ([256, 97, 256, 98, 256, 256], 5)
    """

    decode_record: Callable[[bytes], dict[str, Any]]
    tokenizer: Tokenizer
    seq_len: int

    def __call__(self, record: bytes) -> dict[str, np.ndarray]:
        """Returns a window.

        Args:
          record: Of `GroupedRecords`.

        Returns:
          ``tokens``, ``uint16[T + 1]`` (uint32 if need be): documents, each between two
          tokens that end one, cut off at the end, or filled up with more of those; and
          ``length``, ``int32[]``: how many of them are no filling.
        """
        eod = self.tokenizer.eod
        parts = [np.array([eod])]
        for single in msgpack.unpackb(record):
            text = document_text(self.decode_record(single))
            parts += [self.tokenizer.encode(text), parts[0]]
        tokens = np.concatenate(parts)
        size = self.seq_len + 1
        window = np.full(size, eod, token_dtype(self.tokenizer.vocab_size))
        window[: len(tokens)] = tokens[:size]
        return {"tokens": window, "length": np.array(min(len(tokens), size), np.int32)}


def document_text(example: dict[str, Any]) -> str:
    """Returns the text of a document of others, without a byte-order mark."""
    return example["text"].decode("utf-8-sig", errors="replace")


@dataclass(frozen=True)
class Fit:
    """How documents fit into sequences, found on a sample.

    Attributes:
      records: Documents in one sequence.
      cut: How many of their tokens lie behind the end of a sequence, as a fraction.
      filled: How much of the sequences is no filling, as a fraction.
      sampled: Documents that were looked at.
    """

    records: int
    cut: float
    filled: float
    sampled: int


def choose_group(lengths: Sequence[int], seq_len: int) -> Fit:
    """Chooses how many documents to put into one sequence.

    As many as can be with at most one token in twenty cut off, but one at least:
    a fixed number, for then what a sequence holds follows from its index.

    Args:
      lengths: Tokens of each sampled document with the one that ends it, neighbours
        beside each other.
      seq_len: T.

    Example:
      >>> choose_group([10, 12, 9, 11], seq_len=24).records
      2
    """
    fits = []
    for records in range(1, min(len(lengths), _MOST_GROUPED) + 1):
        whole = len(lengths) // records * records
        sums = np.reshape(np.asarray(lengths[:whole]), (-1, records)).sum(axis=1)
        used = np.minimum(sums, seq_len)
        cut = 1 - used.sum() / sums.sum()
        filled = float(used.mean()) / seq_len
        fits.append(Fit(records, float(cut), filled, len(lengths)))
    good = [fit for fit in fits if fit.cut <= _MOST_CUT]
    return good[-1] if good else fits[0]


def sample_documents(
    source: RecordSource, decode_record: Callable[[bytes], dict[str, Any]]
) -> list[str]:
    """Returns documents of a source: runs of neighbours, always the same ones."""
    runs = range(0, len(source), _MOST_GROUPED)
    chosen = sample_indices(len(runs), math.ceil(_SAMPLE_RECORDS / _MOST_GROUPED))
    return [
        document_text(decode_record(source[index]))
        for run in chosen
        for index in range(runs[run], min(runs[run] + _MOST_GROUPED, len(source)))
    ]
