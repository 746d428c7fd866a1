"""From files to records: threads check images, which are written in order."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from echo_jax.data.prepare.entries import Files
from echo_jax.data.prepare.errors import Bad, BadExampleError, PrepareError, Skipped
from echo_jax.data.prepare.image_check import MAX_IMAGE_BYTES, check_image
from echo_jax.data.prepare.job import HELD_OUT, Progress, Settings, is_held_out
from echo_jax.data.prepare.parallel import ordered_map
from echo_jax.data.prepare.workspace import Workspace
from echo_jax.data.sources.prepared import pack

__all__ = ["Example", "hold_out", "is_image", "write_splits"]

_READ = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
# These are images too, so that they are counted and named, not ignored.
_UNREAD = (".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".jxl")


@dataclass(frozen=True, slots=True)
class Example:
    """An image file, and its record without the image.

    Attributes:
      index: The entry of the source.
      size: Height and width that the image must have; None for any.
    """

    files: Files
    index: int
    entries: dict[str, Any]
    size: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return self.files.entries[self.index].name

    @property
    def bytes(self) -> int:
        return self.files.entries[self.index].bytes


def is_image(name: str) -> bool:
    """Returns whether a file should be an image, by its name."""
    return name.lower().endswith((*_READ, *_UNREAD))


def hold_out(
    splits: dict[str, list[Example]], holdout: float
) -> dict[str, list[Example]]:
    """Returns the splits with a share of the train split as the validation split."""
    if not holdout:
        return splits
    parts: dict[bool, list[Example]] = {False: [], True: []}
    for example in splits["train"]:
        parts[is_held_out(example.name, holdout)].append(example)
    return {**splits, "train": parts[False], HELD_OUT: parts[True]}


def write_splits(
    work: Workspace,
    splits: dict[str, list[Example]],
    settings: Settings,
    skipped: Skipped,
) -> set[tuple[str, str]]:
    """Writes the missing shards; returns split and name of every unusable image."""
    total = sum(example.bytes for examples in splits.values() for example in examples)
    progress = Progress(settings.on_progress, "checking and writing images", total)
    unusable = set()
    for split, examples in splits.items():
        good = 0
        for note in _notes(work, split, examples, settings, progress):
            good += note["shard"]["examples"]
            for bad in note["bad"]:
                unusable.add((split, bad["name"]))
                skipped.add(Bad(**bad))
            skipped.check()
        if not good:
            raise PrepareError(f"no image is left for split {split!r}: {skipped}")
    return unusable


def _notes(
    work: Workspace,
    split: str,
    examples: Sequence[Example],
    settings: Settings,
    progress: Progress,
) -> Iterator[dict[str, Any]]:
    """Yields the notes of all shards, and writes the missing shards."""
    shards = _cut(examples, settings.shard_bytes)
    missing = itertools.chain.from_iterable(
        shard for k, shard in enumerate(shards) if work.note(split, k) is None
    )
    results = ordered_map(
        _record,
        _with_contents(missing),
        num_bytes=lambda job: job[0].bytes,
        workers=settings.num_threads,
    )
    with contextlib.closing(results):
        for number, shard in enumerate(shards):
            if (note := work.note(split, number)) is not None:
                progress.advance(sum(example.bytes for example in shard))
                yield note
                continue
            bad: list[dict[str, str]] = []

            def records(shard=shard, bad=bad) -> Iterator[bytes]:
                for example in shard:
                    result = next(results)
                    progress.advance(example.bytes)
                    if isinstance(result, bytes):
                        yield result
                    else:
                        bad.append(vars(Bad(split, example.name, str(result))))

            yield work.write_shard(split, number, records(), {"bad": bad})


def _cut(examples: Sequence[Example], shard_bytes: float) -> list[list[Example]]:
    """Cuts examples into shards of about one size, at least one."""
    total = sum(example.bytes for example in examples)
    number = max(1, round(total / shard_bytes))
    shards: list[list[Example]] = [[] for _ in range(number)]
    before = 0
    for example in examples:
        shards[min(number - 1, before * number // max(1, total))].append(example)
        before += example.bytes
    return shards


def _with_contents(
    examples: Iterable[Example],
) -> Iterator[tuple[Example, Callable[[], bytes]]]:
    """Yields every example with the function that reads its file."""
    for _, group in itertools.groupby(examples, lambda example: id(example.files)):
        of_one = list(group)
        indices = [example.index for example in of_one]
        contents = of_one[0].files.contents(indices, MAX_IMAGE_BYTES)
        yield from zip(of_one, contents, strict=True)


def _record(job: tuple[Example, Callable[[], bytes]]) -> bytes | BadExampleError:
    """Returns the record of an example, or the reason why it cannot be used."""
    example, read = job
    try:
        image = read()
        size = check_image(image)
    except OSError:
        return BadExampleError("unreadable file")
    except BadExampleError as error:
        return error
    if example.size not in (None, size):
        return BadExampleError("image of another size than its annotations say")
    return pack({"image": image, **example.entries})
