"""A prepared folder during its making: shards in order, and ``dataset.json`` last.

Until the end, everything is in ``DIR/.prepare``. A shard counts once its note exists,
which is written after the shard is on the disk. A shard that a kill leaves half written
has no note, and is written again. A later run compares each shard with the hash in its
note, and makes a changed shard again.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from array_record.python.array_record_module import ArrayRecordWriter
from etils import epath

from echo_jax.data.prepare.job import OnProgress, PrepareError
from echo_jax.data.sources.prepared import (
    DATASET_FILE,
    FORMAT,
    count_records,
    read_info,
)
from echo_jax.files.folders import remove_unfinished, run_folder, typed_path, write
from echo_jax.files.json_files import (
    DamagedFileError,
    read_if_whole,
    read_json,
    write_json,
)
from echo_jax.files.lock import LOCK_NAME, FolderLock

# One record per group, because records are read one by one in any order. Images are
# already compressed, and reading tokens is faster than unpacking them.
_WRITER_OPTIONS = "group_size:1,uncompressed"
_WORK_FOLDER = ".prepare"
_PLAN_FILE = "plan.json"
_OF_PLAN = {"options": dict, "source": dict}
_OF_SHARD = {"shard.examples": int, "shard.bytes": int, "shard.sha256": str}


class Workspace:
    """The folder that a prepare command writes; locked while it is open."""

    def __init__(self, out: Path, options: Mapping[str, Any], on_progress: OnProgress):
        out = typed_path(out)
        self._out, self._work = out, out / _WORK_FOLDER
        self._options = _as_json(options)
        self._on_progress = on_progress
        self._lock = FolderLock(run_folder(out))
        # Shards and files that this run has already compared or written.
        self._plan: dict[str, Any] = {}
        self._notes: dict[tuple[str, int], dict[str, Any]] = {}
        self._files: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        if self._out.exists() and not self._out.is_dir():
            raise PrepareError(f"--out={self._out} is a file")
        found = self._out.iterdir() if self._out.exists() else ()
        # Ignore what a kill has left of a lock.
        names = {path.name for path in found} - {LOCK_NAME}
        if names and not {DATASET_FILE, _WORK_FOLDER} & names:
            raise PrepareError(
                f"--out={self._out} holds {min(names)!r} and is not a prepared folder; "
                "name a new one"
            )
        self._lock.__enter__()
        try:
            remove_unfinished(run_folder(self._out))
            self._work.mkdir(exist_ok=True)
            self._check_options()
        except BaseException:
            self._lock.__exit__()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        is_mistake = kind is not None and issubclass(kind, Exception)
        try:
            # Ctrl-C keeps a plan without shards.
            is_kept = (self._work / _PLAN_FILE).exists() and not is_mistake
            if self._work.is_dir() and not is_kept and not self._has_shards():
                shutil.rmtree(self._work)
        finally:
            self._lock.__exit__()

    def begin(self, source: Any) -> dict[str, Any] | None:
        """Starts or continues; returns ``dataset.json`` if the folder is finished."""
        self._plan = {"options": self._options, "source": _as_json(source)}
        if (self._out / DATASET_FILE).exists():
            info = read_info(self._out)
            if info["source"] != self._plan["source"]:
                raise self._changed()
            shutil.rmtree(self._work)
            return info
        if self._read_plan() != self._plan:
            if self._has_shards():
                raise self._changed()
            self._forget()
            write_json(self._inside(_PLAN_FILE), self._plan)
        return None

    def note(self, split: str, number: int) -> dict[str, Any] | None:
        """Returns the note of a finished shard; None if it has to be made."""
        if (split, number) in self._notes:
            return self._notes[split, number]
        path = self._inside(f"{split}-{number:05}.json")
        try:
            if (note := read_json(path, _OF_SHARD)) is None:
                return None
            if (what := self._difference(split, number, note["shard"])) is None:
                self._notes[split, number] = note
                return note
        except DamagedFileError as error:
            what = f"its note is damaged: {error.what}"
        self._on_progress(f"making shard {number} of {split} again ({what})", 0.0)
        (self._work / path.name).unlink()
        return None

    def write_shard(
        self, split: str, number: int, records: Iterable[bytes], rest: dict[str, Any]
    ) -> dict[str, Any]:
        """Writes a shard; returns its note with `rest`, read after the records."""
        self._lock.check()
        path = self._shard_path(split, number)
        writer = ArrayRecordWriter(str(path), _WRITER_OPTIONS)
        examples = 0
        try:
            for record in records:
                writer.write(record)
                examples += 1
        finally:
            writer.close()
        note = {"shard": {"examples": examples, **_size_and_hash(path)}, **rest}
        write_json(self._inside(f"{split}-{number:05}.json"), note)
        self._notes[split, number] = note
        return note

    def read_file(self, name: str) -> bytes | None:
        """Returns a file beside the shards; None if it is missing or changed."""
        about = read_if_whole(self._inside(f"{name}.json"))
        try:
            content = self._inside(name).read_bytes()
        except FileNotFoundError:
            return None
        return content if _size_and_hash_of(content) == about else None

    def write_file(self, name: str, content: bytes) -> None:
        """Writes a file beside the shards."""
        write(self._inside(name), content)
        self._files[name] = _size_and_hash_of(content)
        write_json(self._inside(f"{name}.json"), self._files[name])

    def publish(
        self,
        splits: Mapping[str, dict[str, Any]],
        files: Sequence[str],
        info: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Moves everything to its place; writes and returns ``dataset.json``."""
        self._lock.check()
        moves: dict[Path, str] = {}
        about = {}
        for split, metadata in splits.items():
            notes = []
            while (note := self.note(split, len(notes))) is not None:
                notes.append(note["shard"])
            for number, shard in enumerate(notes):
                name = f"{split}-{number:05}-of-{len(notes):05}.arrayrecord"
                moves[self._shard_path(split, number)] = name
                notes[number] = {"file": name, **shard}
            examples = sum(shard["examples"] for shard in notes)
            about[split] = {"examples": examples, **metadata, "shards": notes}
        beside = [{"file": name, **self._files[name]} for name in files]
        moves |= {self._work / name: name for name in files}
        for path, name in moves.items():
            if path.exists():
                path.replace(self._out / name)
        whole = {"format": FORMAT, **info, "splits": about, "files": beside}
        text = json.dumps(whole | self._plan, indent=2, ensure_ascii=False)
        write(run_folder(self._out) / DATASET_FILE, f"{text}\n")
        shutil.rmtree(self._work)
        return read_info(self._out)

    def _inside(self, name: str) -> epath.Path:
        return run_folder(self._out) / _WORK_FOLDER / name

    def _shard_path(self, split: str, number: int) -> Path:
        return self._work / f"{split}-{number:05}.arrayrecord"

    def _difference(
        self, split: str, number: int, shard: Mapping[str, Any]
    ) -> str | None:
        path = self._shard_path(split, number)
        if not path.exists():
            # An interrupted `publish` has already moved it.
            placed = self._out.glob(f"{split}-{number:05}-of-*.arrayrecord")
            path = next(placed, path)
        try:
            found = _size_and_hash(path)
        except FileNotFoundError:
            return "it is gone"
        if any(found[name] != shard[name] for name in found):
            return "it has another hash than its note says"
        # A note of an earlier version has no checksum.
        if (examples := count_records(path)) != shard["examples"]:
            return f"it has {examples} records, and its note says {shard['examples']}"
        return None

    def _has_shards(self) -> bool:
        return any(self._work.glob("*-*[0-9].json"))

    def _read_plan(self) -> dict[str, Any] | None:
        try:
            plan = read_json(self._inside(_PLAN_FILE), _OF_PLAN)
            return plan and {name: plan[name] for name in _OF_PLAN}
        except DamagedFileError as error:
            if not self._has_shards():
                return None
            raise PrepareError(
                f"{self._inside(_PLAN_FILE)} is damaged: {error.what}; nothing else "
                "says what the shards beside it are made of, so remove "
                f"--out={self._out} and repeat the command"
            ) from error

    def _check_options(self) -> None:
        is_finished = (self._out / DATASET_FILE).exists()
        plan = read_info(self._out) if is_finished else self._read_plan()
        if plan is None or (before := plan["options"]) == self._options:
            return
        if is_finished or self._has_shards():
            now = self._options
            said = (
                f"--{k.replace('_', '-')} was {before.get(k)!r} and is {now.get(k)!r}"
                for k in {**before, **now}
                if before.get(k) != now.get(k)
            )
            raise PrepareError(
                f"--out={self._out} was begun with other options: {', '.join(said)}. "
                "Use those, or another --out"
            )
        self._forget()

    def _forget(self) -> None:
        for path in self._work.iterdir():
            path.unlink()

    def _changed(self) -> PrepareError:
        return PrepareError(
            f"the source has changed since --out={self._out} was begun; "
            "name another --out"
        )


def _size_and_hash(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
        return {"bytes": stream.tell(), "sha256": digest}


def _size_and_hash_of(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))
