"""Documents packed into sequences: tokenised when read, several in one window.

The token that ends a document also begins the next document. A model that sees this
token as the start of a document predicts every token of the document and its end.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from echo_jax.data.pipeline.evaluation import sample_indices
from echo_jax.data.pipeline.stages import RecordSource
from echo_jax.data.prepare.tokenizer import Tokenizer, token_dtype

__all__ = [
    "Fit",
    "GroupedRecords",
    "PackDocuments",
    "choose_group",
    "document_text",
    "sample_documents",
]

# Size of the sample that decides how many records are put into one sequence.
_SAMPLE_RECORDS = 2000
_MOST_GROUPED = 64
# Largest fraction of tokens to cut off.
_MOST_CUT = 0.05


class GroupedRecords:
    """Groups of `size` neighbouring records, each packed as one record."""

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
    """Turns a record of `GroupedRecords` into a window of T = `seq_len` tokens."""

    decode_record: Callable[[bytes], dict[str, Any]]
    tokenizer: Tokenizer
    seq_len: int

    def __call__(self, record: bytes) -> dict[str, np.ndarray]:
        """Returns ``tokens`` [T + 1] and ``length`` (without filling) of a window."""
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
    """Returns the text of a third-party document without a byte-order mark."""
    return example["text"].decode("utf-8-sig", errors="replace")


@dataclass(frozen=True)
class Fit:
    """Statistics of documents in sequences, from a sample."""

    records: int  # Documents in one sequence.
    cut: float  # Fraction of the tokens beyond the end of a sequence.
    filled: float  # Fraction of a sequence that holds documents.
    sampled: int  # Documents in the sample.


# The number is fixed, so that the index of a sequence decides its content.
def choose_group(lengths: Sequence[int], seq_len: int) -> Fit:
    """Chooses the largest number of documents for which few tokens are cut off."""
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
