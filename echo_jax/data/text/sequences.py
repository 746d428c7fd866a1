"""Sequences for language models: windows of bytes, of prepared tokens, or packed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_jax.data.pipeline.evaluation import sample_indices
from echo_jax.data.pipeline.stages import Item, RecordSource
from echo_jax.data.prepare.job import PrepareError
from echo_jax.data.prepare.tokenizer import (
    TOKENIZER_FILE,
    ByteTokenizer,
    SubwordTokenizer,
    Tokenizer,
)
from echo_jax.data.sources.prepared import Prepared
from echo_jax.data.sources.source import is_made_by_others, open_source
from echo_jax.data.sources.text import TextWindows, decode_window, load_corpus
from echo_jax.data.text.packing import (
    GroupedRecords,
    PackDocuments,
    choose_group,
    sample_documents,
)
from echo_jax.data.text.tokens import DecodeTokens, TokenWindows, unigram_nats
from echo_jax.files.folders import typed_path

__all__ = ["Sequences", "open_sequences"]

_NUM_BYTES = 256
# Tokens for `unigram_nats`: enough for three digits, in one or two seconds.
_MOST_COUNTED = 1 << 22


@dataclass(frozen=True)
class Sequences:
    """Training and validation windows with their decoder and tokenizer.

    Attributes:
      decode: Returns ``{"tokens": [T + 1]}``, and ``"length"`` if filling is possible.
      eod: The token between documents, or None.
      bytes_per_token: Bytes over tokens of the validation text. Both include the
        separators of documents, so bits per byte are comparable.
    """

    train: RecordSource
    validation: RecordSource
    decode: Callable[[bytes], Item]
    vocab: int
    eod: int | None
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
    train, validation = (TextWindows(texts[split], seq_len + 1) for split in splits)
    return Sequences(
        train=train,
        validation=validation,
        decode=decode_window,
        vocab=_NUM_BYTES,
        eod=None,
        bytes_per_token=1.0,
        tokenizer=ByteTokenizer(),
        metadata={
            **corpus.metadata,
            "synthetic": False,
            "window_bytes": seq_len + 1,
            "train_examples": len(train),
            "validation_examples": len(validation),
            "unigram_nats": unigram_nats(
                [texts[splits[0]]], [texts[splits[1]]], _NUM_BYTES
            ),
        },
    )


def _prepared(folder: str, seq_len: int, splits: tuple[str, str]) -> Sequences:
    blocks, windows = {}, {}
    for name, split in zip(("train", "validation"), splits, strict=True):
        blocks[name], _ = open_source(folder, split, "text")
        windows[name] = TokenWindows(blocks[name], seq_len)
    info = blocks["validation"].info
    vocab = info["vocab_size"]
    judged = info["splits"][blocks["validation"].split]
    metadata = blocks["train"].metadata()
    return Sequences(
        **windows,
        decode=DecodeTokens(vocab),
        vocab=vocab,
        eod=info["eod"],
        bytes_per_token=judged["bytes"] / judged["tokens"],
        tokenizer=_tokenizer_of(blocks["validation"]),
        metadata={
            "source": metadata["source"],
            "synthetic": False,
            "tokenizer": info["tokenizer"],
            "vocab": vocab,
            "sha256": metadata["sha256"],
            "window_tokens": seq_len + 1,
            "train_examples": len(windows["train"]),
            "validation_examples": len(windows["validation"]),
            "unigram_nats": unigram_nats(
                _block_tokens(blocks["train"]),
                _block_tokens(blocks["validation"]),
                vocab,
            ),
        },
    )


def _tokenizer_of(blocks: Prepared) -> Tokenizer:
    """Returns the tokenizer of a prepared text, from its folder."""
    if blocks.info["tokenizer"] == "bytes":
        return ByteTokenizer()
    return SubwordTokenizer(blocks.read_file(TOKENIZER_FILE))


def _block_tokens(blocks: Prepared) -> Iterator[np.ndarray]:
    """Yields the tokens of a split, or of a sample of a large one."""
    block, decode = blocks.info["block"], DecodeTokens(blocks.info["vocab_size"])
    whole = TokenWindows(blocks, block)
    for index in sample_indices(len(blocks), _MOST_COUNTED // block):
        # The first token of a block is the last of the one before it.
        yield decode(whole[index])["tokens"][1:]


def _packed(source: str, seq_len: int, name: str, splits: tuple[str, str]) -> Sequences:
    tokenizer = _load_tokenizer(name)
    sampled: dict[str, list[np.ndarray]] = {}
    opened, num_bytes = {}, 0
    _, decode_record = open_source(source, splits[0], "text")
    for place, split in zip(("train", "validation"), splits, strict=True):
        opened[place], _ = open_source(source, split, "text")
        documents = sample_documents(opened[place], decode_record)
        sampled[place] = [
            np.append(tokenizer.encode(text), tokenizer.eod) for text in documents
        ]
        num_bytes = sum(len(text.encode()) for text in documents)
    fit = choose_group([len(tokens) for tokens in sampled["train"]], seq_len)
    windows = {
        split: GroupedRecords(records, fit.records) for split, records in opened.items()
    }
    num_tokens = sum(map(len, sampled["validation"]))
    return Sequences(
        **windows,
        decode=PackDocuments(decode_record, tokenizer, seq_len),
        vocab=tokenizer.vocab_size,
        eod=tokenizer.eod,
        bytes_per_token=num_bytes / num_tokens,
        tokenizer=tokenizer,
        metadata={
            **opened["train"].metadata(),
            "synthetic": False,
            "tokenizer": name,
            "vocab": tokenizer.vocab_size,
            "window_tokens": seq_len + 1,
            "documents_in_a_window": fit.records,
            "tokens_cut_off": fit.cut,
            "window_filled": fit.filled,
            "documents_sampled": fit.sampled,
            "train_examples": len(windows["train"]),
            "validation_examples": len(windows["validation"]),
            "unigram_nats": unigram_nats(
                sampled["train"], sampled["validation"], tokenizer.vocab_size
            ),
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
