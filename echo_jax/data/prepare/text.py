"""Turns text files into blocks of token ids."""

import codecs
import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo_jax.data.compressed import DAMAGED, UnpackError, unpacked_chunks
from echo_jax.data.plain_text import READ_AS, EncodingError, text_chunks
from echo_jax.data.prepare.archives import counted, file_metadata
from echo_jax.data.prepare.documents import DOCUMENTS, BlockStream, Piece, cut, pieces
from echo_jax.data.prepare.files import open_files, several_splits, split_folders
from echo_jax.data.prepare.job import (
    HELD_OUT,
    Bad,
    PrepareError,
    Progress,
    Settings,
    Skipped,
    allowed,
    check_holdout,
    is_held_out,
    names_no_split,
    ordered_map,
    parse_sources,
)
from echo_jax.data.prepare.tokenizer import (
    TOKENIZER_FILE,
    ByteTokenizer,
    SubwordTokenizer,
    Tokenizer,
    sample,
    token_dtype,
    train_subwords,
)
from echo_jax.data.prepare.workspace import Workspace
from echo_jax.data.sources.shard_files import TOO_MANY_FILES
from echo_jax.data.sources.text import structured_ending
from echo_jax.files.folders import typed_path

_TOKENIZERS = ("sentencepiece", "bytes")
_STRUCTURED = "read as plain text, with their braces, commas and names of fields"
_OTHER_PACKED = (".zst", ".zip", ".7z", ".tgz", ".tar", ".parquet")


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """Settings of the tokenisation.

    Attributes:
      tokenizer: ``"sentencepiece"`` for subwords that are learnt from the train
        split, or ``"bytes"``.
      vocab: Number of subwords.
      tokenizer_model: A SentencePiece model to use instead of learning one.
      document: The unit of a document: ``"file"``, ``"line"`` or ``"blank"``.
      block: Predicted tokens of a record: the sequence length of a model.

    Raises:
      PrepareError: A value is out of its range.
    """

    tokenizer: str = "sentencepiece"
    vocab: int = 8192
    tokenizer_model: Path | None = None
    document: str = "file"
    block: int = 256

    def __post_init__(self):
        for name, known in (("tokenizer", _TOKENIZERS), ("document", (*DOCUMENTS,))):
            if (value := getattr(self, name)) not in known:
                raise PrepareError(f"--{name}={value} is none of {', '.join(known)}")
        if self.block < 1:
            raise PrepareError(f"--block={self.block} must be at least 1")
        if self.tokenizer_model and self.tokenizer != "sentencepiece":
            raise PrepareError("--tokenizer-model needs --tokenizer=sentencepiece")

    def options(self) -> dict[str, Any]:
        """Returns the options that decide the content, for ``dataset.json``."""
        options = {
            name: getattr(self, name) for name in ("tokenizer", "document", "block")
        }
        if self.tokenizer_model:
            options["tokenizer_model"] = str(self.tokenizer_model)
        elif self.tokenizer == "sentencepiece":
            options["vocab"] = self.vocab
        return options


@dataclass(frozen=True)
class _TextFile:
    """A text file, its name in its source, and the bytes of its text."""

    path: Path
    name: str
    bytes: int = 0


@dataclass(frozen=True)
class _Split:
    """The documents of a split: all of some files, or a share of them."""

    files: Sequence[_TextFile]
    document: str
    holdout: float = 0.0
    takes_held_out: bool = False

    def pieces(self) -> Iterator[Piece]:
        """Yields the documents in pieces."""
        found = (
            (file, piece)
            for file in self.files
            for piece in pieces(file.path, self.document)
        )
        # The end of the text is held out where names hold out no file, or all.
        held_out = {is_held_out(f"{file.name}:0", self.holdout) for file in self.files}
        if self.holdout and self.document == "file" and len(held_out) == 1:
            total = sum(file.bytes for file in self.files)
            at = total - round(total * self.holdout)
            every = (piece for _, piece in found)
            yield from cut(every, at, is_before=not self.takes_held_out)
            return
        for file, piece in found:
            name = f"{file.name}:{piece.document}"
            if is_held_out(name, self.holdout) == self.takes_held_out:
                yield piece


def prepare_text(
    arguments: Sequence[str], settings: Settings, text: TextSettings
) -> dict[str, Any]:
    """Makes a prepared folder of token blocks.

    The documents of a split form one stream, with an end-of-document id after each. The
    stream is cut into blocks. The last token of a block is also the first token of the
    next block, so every token but the first is predicted once. Tokens after the last
    full block are dropped and counted. Subwords are learnt from the train split and
    used for all splits.

    The holdout takes documents by a hash of their names and numbers. If documents are
    whole files, and the hash would take none or all of them, it takes the end of the
    text, cut after a line. The bytes of a split are the bytes of its text, each counted
    once. They include the line ends and blank lines between documents.

    Line ends of Windows and old Macs are read as line feeds. A byte-order mark is
    dropped.

    Args:
      arguments: ``SPLIT=SOURCE`` or ``SOURCE``: text files, plain or packed, or
        folders of them. A single ``SOURCE`` may hold the folders ``train`` and
        ``val``, ``valid``, ``validation`` or ``test``. These are its splits, if it
        holds nothing else.
      settings: The other options of the command.
      text: Settings of the tokenisation.

    Returns:
      The content of ``dataset.json``.

    Raises:
      PrepareError: A source is invalid, too much of it is bad, or the folder holds
        something else.

    Example:
      >>> prepare_text(
      ...     ["train=train.txt.xz", "validation=valid.txt.xz"],
      ...     Settings(out=Path("data/wikitext2")),
      ...     TextSettings(document="line"),
      ... )
    """
    sources = parse_sources(arguments, settings.holdout)
    options = settings.options(sources, kind="text", **text.options())
    with Workspace(settings.out, options, settings.on_progress) as work:
        layout: dict[str, str] = {}
        if names_no_split(arguments):
            sources, layout = _by_split(sources["train"])
            check_holdout(sources, settings.holdout)
        files = {split: _text_files(paths) for split, paths in sources.items()}
        metadata, files, bad = _scan(files, settings)
        if text.tokenizer_model:
            metadata["tokenizer.model"] = [file_metadata(text.tokenizer_model)]
        if (info := work.begin(metadata)) is not None:
            return info
        total = len(bad) + sum(map(len, files.values()))
        skipped = Skipped(allowed(settings.max_bad, total), total)
        for one in bad:
            skipped.add(one)
        skipped.check()
        splits = {split: _Split(of, text.document) for split, of in files.items()}
        if settings.holdout:
            of = files["train"], text.document, settings.holdout
            splits |= {"train": _Split(*of), HELD_OUT: _Split(*of, takes_held_out=True)}
        structured = (
            (ending, f"{split}: {file.name}")
            for split, of in files.items()
            for file in of
            if (ending := structured_ending(file.path))
        )
        tokenizer = _tokenizer(work, splits, settings, text)
        dtype = token_dtype(tokenizer.vocab_size)
        return work.publish(
            _write(work, splits, tokenizer, settings, text.block),
            files=[TOKENIZER_FILE] if text.tokenizer == "sentencepiece" else [],
            info={
                "kind": "text",
                "features": {"tokens": f"{dtype}[block + 1], little-endian"},
                "read_as": READ_AS,
                "tokenizer": text.tokenizer,
                "block": text.block,
                "vocab_size": tokenizer.vocab_size,
                "eod": tokenizer.eod,
                "skipped": skipped.metadata(),
                "notes": counted(_STRUCTURED, structured),
                **({"layout": layout} if layout else {}),
            },
        )


def _by_split(paths: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    sources, layout = defaultdict(list), {}
    for path in paths:
        folders = {"train": ""}
        if Path(path).is_dir():
            files = open_files(Path(path))
            found, is_layout = split_folders(files, bool, of_classes=False)
            if len(found) > 1 and not is_layout:
                raise PrepareError(several_splits(path, found))
            folders = found if is_layout else folders
        for split, folder in folders.items():
            sources[split].append(source := str(Path(path, folder)))
            if folder:
                layout[source] = split
    return dict(sources), layout


def _text_files(paths: Sequence[str]) -> list[_TextFile]:
    files = []
    for path in map(typed_path, paths):
        if path.is_dir():
            listed = open_files(path).entries
            files += [_TextFile(path / entry.name, entry.name) for entry in listed]
        elif path.is_file():
            files.append(_TextFile(path, path.name))
        else:
            raise PrepareError(f"{str(path)!r} does not exist; name a file or folder")
    for file in files:
        if file.path.suffix.lower() in _OTHER_PACKED:
            raise PrepareError(f"{str(file.path)!r} is not text; unpack it first")
    if not files:
        raise PrepareError(f"{', '.join(paths)} holds no files; name another folder")
    return files


def _scan(
    files: dict[str, list[_TextFile]], settings: Settings
) -> tuple[dict[str, Any], dict[str, list[_TextFile]], list[Bad]]:
    jobs = [(split, file) for split, of in files.items() for file in of]
    total = sum(file.path.stat().st_size for _, file in jobs)
    progress = Progress(settings.on_progress, "reading text", total)
    metadata = {split: [] for split in files}
    good = {split: [] for split in files}
    bad = []
    scanned = ordered_map(
        lambda job: _scan_file(job[1]),
        jobs,
        num_bytes=lambda job: job[1].path.stat().st_size,
        workers=settings.num_threads,
    )
    with contextlib.closing(scanned):
        for (split, file), (about, found) in zip(jobs, scanned, strict=True):
            progress.advance(about["bytes"])
            metadata[split].append(about)
            if isinstance(found, int):
                good[split].append(_TextFile(file.path, file.name, found))
            else:
                bad.append(Bad(split, file.name, found))
    return metadata, good, bad


def _scan_file(file: _TextFile) -> tuple[dict[str, Any], int | str]:
    metadata = file_metadata(file.path)
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    try:
        for chunk in text_chunks(unpacked_chunks(file.path)):
            decoder.decode(chunk)
            size += len(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return metadata, "not UTF-8"
    except EncodingError as error:
        return metadata, str(error)
    except DAMAGED as error:
        if getattr(error, "errno", None) in TOO_MANY_FILES:
            raise
        return metadata, "damaged or truncated"
    except UnpackError:
        return metadata, "unpacks to far more than its size"
    return metadata, size or "empty file"


def _tokenizer(
    work: Workspace, splits: dict[str, _Split], settings: Settings, text: TextSettings
) -> Tokenizer:
    if text.tokenizer == "bytes":
        return ByteTokenizer()
    if text.tokenizer_model:
        model = text.tokenizer_model.read_bytes()
    else:
        found = work.read_file(TOKENIZER_FILE)
        model = found or _learnt(splits, settings, text.vocab)
    try:
        tokenizer = SubwordTokenizer(model)
    except PrepareError as error:
        raise PrepareError(
            f"--tokenizer-model={text.tokenizer_model}: {error}"
        ) from error
    work.write_file(TOKENIZER_FILE, model)
    return tokenizer


def _learnt(splits: dict[str, _Split], settings: Settings, vocab: int) -> bytes:
    if "train" not in splits:
        raise PrepareError(
            "subwords are learnt from the train split, and there is none; name one, "
            "or a --tokenizer-model, or set --tokenizer=bytes"
        )
    settings.on_progress(f"learning {vocab} subwords", 0.0)
    lines = (
        line for piece in splits["train"].pieces() for line in piece.text.split("\n")
    )
    return train_subwords(sample(lines), vocab)


def _write(
    work: Workspace,
    splits: dict[str, _Split],
    tokenizer: Tokenizer,
    settings: Settings,
    block: int,
) -> dict[str, dict[str, Any]]:
    files = {file for split in splits.values() for file in split.files}
    total = sum(file.bytes for file in files)
    progress = Progress(settings.on_progress, "writing tokens", total)
    record_bytes = (block + 1) * token_dtype(tokenizer.vocab_size).itemsize
    per_shard = max(1, int(settings.shard_bytes / record_bytes))
    about: dict[str, dict[str, Any]] = {}
    for name, split in splits.items():
        number, note = 0, None
        while (finished := work.note(name, number)) is not None:
            number, note = number + 1, finished
        before = sum(metadata["bytes"] for metadata in about.values())
        stream = BlockStream(
            split.pieces(), tokenizer, block, settings.num_threads, note
        )
        with contextlib.closing(stream):
            while not stream.is_done:
                rest: dict[str, Any] = {}

                def records(rest=rest, stream=stream, before=before) -> Iterator[bytes]:
                    for record in stream.blocks(per_shard):
                        yield record
                        progress.reach(before + stream.bytes)
                    rest.update(stream.note())

                work.write_shard(name, number, records(), rest)
                number += 1
        if not number:
            raise PrepareError(
                f"split {name!r} has {stream.tokens} tokens, and a block takes "
                f"{block + 1}; name more text, lower --block, or set another --holdout"
            )
        about[name] = {
            "documents": stream.documents,
            "tokens": stream.tokens,
            "tokens_left_out": (stream.tokens - 1) % block,
            "bytes": stream.bytes,
        }
    return about
