"""Byte corpora: the standard library's own sources, or files that a user names.

A corpus with several files is split by file, so that no window of the validation split
continues a file of the train split. A hash of names decides, which is the same on every
machine; an added file moves no other file.
"""

import glob
import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from echo_jax.data.compressed import DAMAGED, PACKED_SUFFIXES, unpacked_chunks
from echo_jax.data.plain_text import EncodingError, text_chunks
from echo_jax.files.folders import typed_path

MAX_TEXT_BYTES = 2 * 1024**3
"""Largest corpus, in bytes after decompression: it is held in memory."""

_SUFFIXES = (".txt", *PACKED_SUFFIXES)
# In these files, text is among braces, quotes and names of fields.
_STRUCTURED = (".json", ".jsonl", ".ndjson", ".csv", ".tsv")

# Share of the validation split: one file in 20, or the last 1/20 of a single file.
_VALIDATION_SHARE = 20

# Test suites are more than half of the library's bytes and differ from the rest. The
# other names are not the standard library.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages"}
)
# The build of Python writes these files. They hold paths, not source code.
_SKIPPED_PREFIX = "_sysconfigdata"


@dataclass(frozen=True, eq=False)
class TextCorpus:
    """The bytes of a corpus by split, read-only, with files in the order of names."""

    train: np.ndarray
    validation: np.ndarray
    metadata: dict[str, Any]


class TextWindows:
    """The windows of a text, end to end; a window may span two files."""

    def __init__(self, text: np.ndarray, window_bytes: int):
        if len(text) < window_bytes:
            raise ValueError(
                f"A split of {len(text)} bytes holds no window of {window_bytes} "
                "bytes; name more text in data.source or lower model.seq_len."
            )
        self._text = text
        self._window_bytes = window_bytes

    def __len__(self) -> int:
        return len(self._text) // self._window_bytes

    def __getitem__(self, index: int) -> bytes:
        start = index * self._window_bytes
        return self._text[start : start + self._window_bytes].tobytes()


def structured_ending(path: Path) -> str:
    """Returns the ending of a table or of JSON, perhaps packed; else an empty text."""
    packed = path.suffix.lower() in PACKED_SUFFIXES
    ending = (path.with_suffix("") if packed else path).suffix.lower()
    return ending if ending in _STRUCTURED else ""


def decode_window(record: bytes) -> dict[str, np.ndarray]:
    """Returns a window as ``{"tokens": uint8[window_bytes]}``, read-only."""
    return {"tokens": np.frombuffer(record, np.uint8)}


def load_corpus(source: str, *, max_bytes: int = MAX_TEXT_BYTES) -> TextCorpus:
    """Reads and splits ``"stdlib"``, or files and patterns separated by commas."""
    if source == "stdlib":
        files = _stdlib_files(Path(sysconfig.get_path("stdlib")))
        about = {"source": "stdlib", "python": platform.python_version()}
    else:
        files = _user_files(source)
        about = {"source": source}
    texts = _read_files(files, max_bytes)
    if len(texts) == 1:
        ((name, text),) = texts.items()
        cut = len(text) - len(text) // _VALIDATION_SHARE
        train, validation = {name: text[:cut]}, {name: text[cut:]}
        about["split"] = "last twentieth of the file"
    else:
        held_out = _held_out(texts)
        train = {name: text for name, text in texts.items() if name not in held_out}
        validation = {name: texts[name] for name in texts if name in held_out}
        about["split"] = "by file"
    digest = hashlib.sha256()
    for name, text in texts.items():
        digest.update(f"{name}\0{len(text)}\0".encode())
        digest.update(text)
    corpus = TextCorpus(_joined(train), _joined(validation), about)
    about |= {
        "files": len(texts),
        "train_files": len(train),
        "validation_files": len(validation),
        "train_bytes": len(corpus.train),
        "validation_bytes": len(corpus.validation),
        "sha256": digest.hexdigest(),
    }
    return corpus


def _stdlib_files(root: Path) -> dict[str, Path]:
    files = {}
    for folder, folders, names in os.walk(root):
        # Never enter these: other packages can have a hundred times as many files.
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        for name in names:
            path = Path(folder, name)
            # Distributions link their own files into the library's folder.
            if (
                path.suffix == ".py"
                and not name.startswith(_SKIPPED_PREFIX)
                and not path.is_symlink()
            ):
                files[path.relative_to(root).as_posix()] = path
    if len(files) < 2:
        raise ValueError(
            f"data.source='stdlib' found {len(files)} source files below {root}: "
            "this Python comes without its sources. Name text files instead, as "
            "in --config.data.source=mytext.txt."
        )
    return files


def _user_files(source: str) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for part in (part.strip() for part in source.split(",")):
        pattern = str(typed_path(part))
        # A name may contain brackets, so an existing path is taken literally.
        paths = [pattern] if Path(pattern).is_file() else glob.glob(pattern)
        found = [Path(path) for path in paths if Path(path).is_file()]
        if not part or not found:
            raise FileNotFoundError(
                f"data.source={source!r}: {part and pattern!r} matches no file. Use "
                "'stdlib', or paths and patterns separated by commas."
            )
        for path in found:
            ending = structured_ending(path) or path.suffix
            if ending.lower() not in _SUFFIXES:
                raise ValueError(
                    f"data.source names {str(path)!r}, of type {ending!r}; "
                    f"text is read from {', '.join(_SUFFIXES)} files."
                )
            if files.setdefault(path.name, path).resolve() != path.resolve():
                raise ValueError(
                    f"data.source names two files called {path.name!r}; the split "
                    "goes by name, so rename one of them."
                )
    return files


def _read_files(files: dict[str, Path], max_bytes: int) -> dict[str, bytes]:
    texts, total_bytes = {}, 0
    for name in sorted(files):
        path = files[name]
        chunks = []
        try:
            for chunk in text_chunks(unpacked_chunks(path)):
                chunks.append(chunk)
                total_bytes += len(chunk)
                if total_bytes > max_bytes:
                    raise ValueError(
                        f"data.source holds more than {max_bytes} bytes of text "
                        f"once {str(path)!r} is unpacked: the limit is "
                        "echo_jax.data.sources.text.MAX_TEXT_BYTES. Name fewer files."
                    )
        except EncodingError as error:
            raise ValueError(f"{str(path)!r} cannot be read: {error}.") from error
        except DAMAGED as error:
            raise ValueError(
                f"{str(path)!r} cannot be unpacked: {error}. Compress "
                "it again, or leave it out of data.source."
            ) from error
        texts[name] = b"".join(chunks)
    return texts


def _held_out(names: dict[str, bytes]) -> set[str]:
    hashes = {
        name: int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        for name in names
    }
    held_out = {name for name in names if hashes[name] % _VALIDATION_SHARE == 0}
    if not held_out or len(held_out) == len(names):
        return {min(names, key=lambda name: hashes[name])}
    return held_out


def _joined(texts: dict[str, bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(texts.values()), np.uint8)
