"""Sequences for language models: windows of bytes, of prepared tokens, or packed.

A window holds T + 1 tokens: T inputs, and for each the token to predict. The token that
ends a document also begins the next one. A model that sees it as the start of a
document predicts every token of the document and its end.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgpack
import numpy as np

from echo_jax.data.pipeline.evaluation import sample_indices
from echo_jax.data.pipeline.stages import Item, RecordSource
from echo_jax.data.prepare.job import PrepareError
from echo_jax.data.prepare.tokenizer import (
    TOKENIZER_FILE,
    ByteTokenizer,
    SubwordTokenizer,
    Tokenizer,
    token_dtype,
)
from echo_jax.data.sources.prepared import Prepared
from echo_jax.data.sources.source import DecodeRecord, is_made_by_others, open_source
from echo_jax.data.sources.text import TextWindows, decode_window, load_corpus
from echo_jax.files.folders import typed_path

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
        records = [self._source[first + i] for i in range(self._size)]
        return cast(bytes, msgpack.packb(records))


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


_NUM_BYTES = 256
_COUNTED_AT_ONCE = 1 << 20
# Tokens for `unigram_nats`: enough for three digits, in one or two seconds.
_MOST_COUNTED = 1 << 22

_decode_block = DecodeRecord("text")


@dataclass(frozen=True)
class Sequences:
    """Training and validation windows with their decoder and tokenizer."""

    train: RecordSource
    validation: RecordSource
    # Returns ``{"tokens": [T + 1]}``, and ``"length"`` if filling is possible.
    decode: Callable[[bytes], Item]
    vocab: int
    eod: int | None  # The token between documents.
    # Counted in the validation text, with the separators of documents, so that bits
    # per byte are comparable.
    bytes_per_token: float
    tokenizer: Tokenizer
    metadata: dict[str, Any]

    @property
    def task_info(self) -> dict[str, Any]:
        """Returns the facts that a language model needs about its tokens, for JSON."""
        return {
            "vocab": self.vocab,
            "eod": self.eod,
            "bytes_per_token": self.bytes_per_token,
            "tokenizer": next(iter(self.task_files), "bytes"),
        }

    @property
    def task_files(self) -> dict[str, bytes]:
        """Returns the tokenizer's model by file name; empty for bytes."""
        if isinstance(self.tokenizer, SubwordTokenizer):
            return {TOKENIZER_FILE: self.tokenizer.model}
        return {}


def open_sequences(
    source: str,
    seq_len: int,
    tokenizer: str = "",
    splits: tuple[str, str] = ("train", "validation"),
) -> Sequences:
    """Opens the windows of `source` (see `open_source`), T = `seq_len`."""
    if is_made_by_others(source):
        return _packed(source, seq_len, tokenizer, splits)
    if tokenizer:
        raise ValueError(
            f"data.tokenizer={tokenizer!r} goes with documents of others (tfds:NAME); "
            f"data.source={source!r} is read as it is. Use --config.data.tokenizer=''."
        )
    if not source or typed_path(source).is_dir():
        return _prepared(source, seq_len, splits)
    return _bytes(source, seq_len, splits)


def _bytes(source: str, seq_len: int, splits: tuple[str, str]) -> Sequences:
    corpus = load_corpus(source)
    texts = {"train": corpus.train, "validation": corpus.validation}
    for split in splits:
        if split not in texts:
            raise ValueError(
                f"data.source={source!r} has no split {split!r}; it has "
                f"{', '.join(texts)}."
            )
    windows = [TextWindows(texts[split], seq_len + 1) for split in splits]
    return Sequences(
        *windows,
        decode=decode_window,
        vocab=_NUM_BYTES,
        eod=None,
        bytes_per_token=1.0,
        tokenizer=ByteTokenizer(),
        metadata={
            **corpus.metadata,
            "window_bytes": seq_len + 1,
            **_counted(windows, [[texts[split]] for split in splits], _NUM_BYTES),
        },
    )


def _counted(windows: Any, tokens: Any, vocab: int) -> dict[str, Any]:
    train, validation = tokens
    return {
        "synthetic": False,
        "train_examples": len(windows[0]),
        "validation_examples": len(windows[1]),
        "unigram_nats": unigram_nats(train, validation, vocab),
    }


def _prepared(folder: str, seq_len: int, splits: tuple[str, str]) -> Sequences:
    blocks: list[Any] = [open_source(folder, split, "text")[0] for split in splits]
    train, validation = blocks
    windows = [TokenWindows(each, seq_len) for each in blocks]
    info, metadata = validation.info, train.metadata()
    vocab, judged = info["vocab_size"], info["splits"][validation.split]
    tokenizer = ByteTokenizer()
    if info["tokenizer"] != "bytes":
        tokenizer = SubwordTokenizer(validation.read_file(TOKENIZER_FILE))
    return Sequences(
        *windows,
        decode=DecodeTokens(vocab),
        vocab=vocab,
        eod=info["eod"],
        bytes_per_token=judged["bytes"] / judged["tokens"],
        tokenizer=tokenizer,
        metadata={
            "source": metadata["source"],
            "tokenizer": info["tokenizer"],
            "vocab": vocab,
            "sha256": metadata["sha256"],
            "window_tokens": seq_len + 1,
            **_counted(windows, map(_block_tokens, blocks), vocab),
        },
    )


def _block_tokens(blocks: Prepared) -> Iterator[np.ndarray]:
    block, decode = blocks.info["block"], DecodeTokens(blocks.info["vocab_size"])
    whole = TokenWindows(blocks, block)
    for index in sample_indices(len(blocks), _MOST_COUNTED // block):
        # The first token of a block is the last of the one before it.
        yield decode(whole[index])["tokens"][1:]


def _packed(source: str, seq_len: int, name: str, splits: tuple[str, str]) -> Sequences:
    tokenizer = _load_tokenizer(name)
    _, decode_record = open_source(source, splits[0], "text")
    opened, sampled, num_bytes = [], [], 0
    for split in splits:
        opened.append(open_source(source, split, "text")[0])
        documents = sample_documents(opened[-1], decode_record)
        sampled.append(
            [np.append(tokenizer.encode(text), tokenizer.eod) for text in documents]
        )
        num_bytes = sum(len(text.encode()) for text in documents)
    fit = choose_group([len(tokens) for tokens in sampled[0]], seq_len)
    windows = [GroupedRecords(records, fit.records) for records in opened]
    return Sequences(
        *windows,
        decode=PackDocuments(decode_record, tokenizer, seq_len),
        vocab=tokenizer.vocab_size,
        eod=tokenizer.eod,
        bytes_per_token=num_bytes / sum(map(len, sampled[1])),
        tokenizer=tokenizer,
        metadata={
            **opened[0].metadata(),
            "tokenizer": name,
            "vocab": tokenizer.vocab_size,
            "window_tokens": seq_len + 1,
            "documents_in_a_window": fit.records,
            "tokens_cut_off": fit.cut,
            "window_filled": fit.filled,
            "documents_sampled": fit.sampled,
            **_counted(windows, sampled, tokenizer.vocab_size),
        },
    )


def _load_tokenizer(name: str) -> Tokenizer:
    if name == "bytes":
        return ByteTokenizer()
    try:
        return SubwordTokenizer(typed_path(name).read_bytes())
    except (OSError, PrepareError) as error:
        raise ValueError(
            f"data.tokenizer={name!r} cannot be used: {error}. Name a tokenizer.model "
            "of `echo-jax prepare text`, as in "
            "--config.data.tokenizer=data/text/tokenizer.model, or 'bytes'."
        ) from error


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
