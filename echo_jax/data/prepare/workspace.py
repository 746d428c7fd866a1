"""A prepared folder as it is made: shards one after another, ``dataset.json`` last.

Until all is done, everything lies in ``DIR/.prepare``. A shard counts once its note
is there, which is written after the shard itself is on the disk; what a kill leaves
half written has no note and is written again.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from array_record.python.array_record_module import ArrayRecordWriter

from echo_jax.data.prepare.errors import PrepareError, difference
from echo_jax.data.prepare.job import OnProgress
from echo_jax.data.prepared import DATASET_FILE, FORMAT, read_info
from echo_jax.folders import is_unfinished, run_folder
from echo_jax.json_files import seal
from echo_jax.lock import LOCK_NAME, FolderLock

__all__ = ["Workspace"]

# One record a group: records are read one by one, in any order. Images are
# compressed already, and tokens are read faster than unpacked.
_WRITER_OPTIONS = "group_size:1,uncompressed"
_WORK_FOLDER = ".prepare"
_PLAN_FILE = "plan.json"


class Workspace:
    """The folder that a prepare command writes, for as long as it does.

    Args:
      out: The folder; made if there is none.
      options: What decides the content, beside the source: a second sitting must
        have the same.
      on_progress: Told how long it waits for another process, which may be gone.

    Raises:
      PrepareError: If the folder holds anything else, or what other options made.
      FolderInUseError: If another process is writing it.
    """

    def __init__(
        self,
        out: Path,
        options: Mapping[str, Any],
        on_progress: OnProgress | None = None,
    ):
        self._out, self._work = out, out / _WORK_FOLDER
        self._options = _as_json(options)
        self._lock = FolderLock(run_folder(out), on_wait=on_progress)

    def __enter__(self) -> Self:
        # What is left of a lock by a kill says nothing of what the folder is.
        names = {name for name in _names(self._out) if not is_unfinished(name)}
        names -= {LOCK_NAME}
        if names and not {DATASET_FILE, _WORK_FOLDER} & names:
            raise PrepareError(
                f"--out={self._out} holds {min(names)!r} and is no prepared folder; "
                "name a new one"
            )
        self._lock.__enter__()
        try:
            run_folder(self._out).remove_unfinished()
            # Neither the folder nor what is in it is a link that leads elsewhere.
            work = run_folder(self._out) / _WORK_FOLDER
            work.mkdir()
            work.for_others()
            self._check_options()
        except BaseException:
            self._lock.__exit__()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            self._forget_mistake(kind is not None and issubclass(kind, Exception))
        finally:
            self._lock.__exit__()

    def begin(self, source: Any) -> dict[str, Any] | None:
        """Starts, or goes on where an earlier sitting stopped.

        Args:
          source: What is known of the source, as JSON values.

        Returns:
          The folder's ``dataset.json`` if it is finished already, else None.

        Raises:
          PrepareError: If the source is not what the earlier sitting has read.
        """
        source = _as_json(source)
        if (self._out / DATASET_FILE).exists():
            info = read_info(self._out)
            if info["source"] != source:
                raise self._changed()
            shutil.rmtree(self._work)
            return info
        plan = {"options": self._options, "source": source}
        if _read_json(self._work / _PLAN_FILE) != plan:
            if self._has_shards():
                raise self._changed()
            self._forget()
            self._write(f"{_WORK_FOLDER}/{_PLAN_FILE}", _json_bytes(plan))
        return None

    def note(self, split: str, number: int) -> dict[str, Any] | None:
        """Returns what is known of a finished shard; None if it is not finished."""
        return _read_json(self._work / f"{split}-{number:05}.json")

    def write_shard(
        self, split: str, number: int, records: Iterable[bytes], rest: dict[str, Any]
    ) -> dict[str, Any]:
        """Writes a shard.

        Args:
          split: Its split.
          number: Its number in the split, from 0 on.
          records: Its records.
          rest: What the next sitting has to know; read when the records are
            written, so that they may change it.

        Returns:
          What `note` returns from now on.
        """
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
        self._write(f"{_WORK_FOLDER}/{split}-{number:05}.json", _json_bytes(note))
        return note

    def file(self, name: str) -> Path:
        """Returns where a file beside the shards lies while it is worked on."""
        return self._work / name

    def write_file(self, name: str, content: bytes) -> None:
        """Writes a file that lies beside the shards."""
        self._write(f"{_WORK_FOLDER}/{name}", content)

    def publish(
        self,
        splits: Mapping[str, dict[str, Any]],
        files: Iterable[str],
        info: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Puts everything in its place, and writes ``dataset.json``.

        Args:
          splits: What to say about each split, beside its shards.
          files: The names of the files beside the shards; `write_file` has written
            them in this sitting.
          info: What else to say.

        Returns:
          The content of ``dataset.json``.
        """
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
        beside = []
        for name in files:
            path = self._work / name
            beside.append({"file": name, **_size_and_hash(path)})
            moves[self._work / name] = name
        for path, name in moves.items():
            if path.exists():
                path.replace(self._out / name)
        plan = _read_json(self._work / _PLAN_FILE) or {}
        whole = {"format": FORMAT, **info, "splits": about, "files": beside, **plan}
        self._write(DATASET_FILE, _json_bytes(seal(whole)))
        shutil.rmtree(self._work)
        return read_info(self._out)

    def _write(self, name: str, content: bytes) -> None:
        (run_folder(self._out) / name).write(content)

    def _shard_path(self, split: str, number: int) -> Path:
        return self._work / f"{split}-{number:05}.arrayrecord"

    def _has_shards(self) -> bool:
        """Tells whether any shard is finished."""
        return any(self._work.glob("*-*.json"))

    def _check_options(self) -> None:
        """Refuses what other options have made; forgets it if it is no shard yet."""
        if (self._out / DATASET_FILE).exists():
            before = read_info(self._out)["options"]
        elif (plan := _read_json(self._work / _PLAN_FILE)) is not None:
            before = plan["options"]
        else:
            return
        if before == self._options:
            return
        if self._has_shards() or (self._out / DATASET_FILE).exists():
            raise PrepareError(
                f"--out={self._out} was begun with other options: "
                f"{difference(before, self._options)}. Use those, or another --out"
            )
        self._forget()

    def _forget(self) -> None:
        for path in self._work.iterdir():
            path.unlink()

    def _forget_mistake(self, is_mistake: bool) -> None:
        """Leaves nothing behind after a mistake; after Ctrl-C, what was begun."""
        is_begun = (self._work / _PLAN_FILE).exists()
        if (
            self._work.is_dir()
            and not self._has_shards()
            and (is_mistake or not is_begun)
        ):
            shutil.rmtree(self._work)

    def _changed(self) -> PrepareError:
        return PrepareError(
            f"the source has changed since --out={self._out} was begun; "
            "name another --out"
        )


def _names(out: Path) -> set[str]:
    """Returns the names in a folder; none if there is no such folder."""
    if out.exists() and not out.is_dir():
        raise PrepareError(f"--out={out} is a file")
    return {path.name for path in out.iterdir()} if out.exists() else set()


def _size_and_hash(path: Path) -> dict[str, Any]:
    """Puts a file on the disk; returns its size and hash."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        os.fsync(stream.fileno())
        return {"bytes": stream.tell(), "sha256": digest}


def _as_json(value: Any) -> Any:
    """Returns the value as it is read back from JSON: tuples as lists."""
    return json.loads(json.dumps(value))


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _read_json(path: Path) -> Any | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
