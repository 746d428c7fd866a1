"""Text to token ids: bytes, or subwords of SentencePiece."""

import heapq
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import sentencepiece

from echo_jax.data.prepare.job import PrepareError
from echo_jax.echo.keys import seed_for_use

TOKENIZER_FILE = "tokenizer.model"
"""Holds a model of sentencepiece, beside the data or in a run folder."""

_SAMPLE_BYTES = 64 * 1024**2
_SEED = 0
# SentencePiece ignores longer lines in training; pieces of documents are shorter.
_MAX_LINE_BYTES = 2**20


@dataclass(frozen=True)
class ByteTokenizer:
    """The ids are the bytes of UTF-8, and one more id ends a document."""

    vocab_size: int = 257
    eod: int = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids; invalid UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i < self.eod).decode(errors="replace")


class SubwordTokenizer:
    """The pieces of a SentencePiece model; `model` is the content of its file."""

    def __init__(self, model: bytes):
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise PrepareError(
                f"it is not a SentencePiece model ({error}). Give the .model file that "
                "its training wrote."
            ) from error
        self.model = model
        self.vocab_size = self._processor.vocab_size()
        self.eod = self._processor.eos_id()
        if self.eod < 0:
            raise PrepareError(
                "the model has no end-of-sentence token, which separates documents. "
                "Train it with eos_id set."
            )

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._processor.encode(text), np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([int(i) for i in ids if i != self.eod])


Tokenizer = ByteTokenizer | SubwordTokenizer
"""Turns text into ids below ``vocab_size``; the id ``eod`` ends a document."""


# Characters outside all pieces become bytes, and text is not normalised, so decoding
# restores it (except U+2581, which stands for a space). On WikiText-2 with 8192 pieces,
# byte pairs need 1.31 tokens a word; SentencePiece's unigram model needs 1.59.
def train_subwords(lines: Iterable[str], vocab_size: int) -> bytes:
    """Trains a byte-pair encoding of any text; returns the model file's bytes."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            # Not "<unk>", which text may hold, as WikiText does: its pieces would
            # not be learnt.
            unk_piece="<|unk|>",
            eos_piece="<|eod|>",
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            max_sentence_length=_MAX_LINE_BYTES,
            # Threads would sum in a different order each time.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        if fits := re.search(r"value <= (\d+)", str(error)):
            raise PrepareError(
                f"there is too little text for --vocab={vocab_size}; set --vocab to "
                f"{fits[1]} or less, or --tokenizer=bytes"
            ) from error
        raise PrepareError(
            f"sentencepiece cannot learn --vocab={vocab_size} pieces of this text: "
            f"{error}; set another --vocab, or --tokenizer=bytes"
        ) from error
    return model.getvalue()


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the type of stored ids, little-endian."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def sample(lines: Iterable[str], max_bytes: int = _SAMPLE_BYTES) -> list[str]:
    """Returns up to `max_bytes` of random lines, in order; positions decide which."""
    taken: list[tuple[int, int, str]] = []
    size = 0
    for number, line in enumerate(lines):
        heapq.heappush(taken, (-int(seed_for_use(_SEED, number, 0)), number, line))
        size += len(line.encode())
        while size > max_bytes and len(taken) > 1:
            size -= len(heapq.heappop(taken)[2].encode())
    return [line for _, _, line in sorted(taken, key=lambda entry: entry[1])]
