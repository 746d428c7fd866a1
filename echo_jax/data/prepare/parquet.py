"""Images with labels in a Parquet file, as Hugging Face stores them."""

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from echo_jax.data.prepare.entries import (
    Entry,
    Readers,
    file_metadata,
    name_problem,
    whole,
)
from echo_jax.data.prepare.job import PrepareError

__all__ = ["ParquetFiles"]

_ROWS = 256
# Largest row group. It is read as a whole, and its images are already compressed.
_MAX_GROUP_BYTES = 2 * 1024**3


class ParquetFiles:
    """Images of a Parquet file, each as a file in a folder named after its class."""

    def __init__(self, path: Path):
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise PrepareError(
                f"{str(path)!r} is read by pyarrow, which is not installed: "
                "pip install 'echo-jax[parquet]'"
            ) from error
        self._path = path
        # The file's own metadata may be invalid too.
        damaged = (pyarrow.ArrowException, OSError, ValueError, TypeError)
        self.metadata = file_metadata(path)
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                self._image, label, names = _columns(file.schema_arrow)
                groups = [
                    file.metadata.row_group(n) for n in range(file.num_row_groups)
                ]
                if any(g.total_byte_size > _MAX_GROUP_BYTES for g in groups):
                    raise ValueError(f"a row group takes over {_MAX_GROUP_BYTES} bytes")
            self._group_rows = [group.num_rows for group in groups]
            every = range(len(groups))
            rows = self._batches(every, [self._image, label])
            self.entries = [
                _entry(number, _class_name(of_class, names), *image)
                for number, (image, of_class) in enumerate(
                    (_image(row[0]), row[1]) for batch in rows for row in batch
                )
            ]
        except (*damaged, AttributeError) as error:
            raise PrepareError(f"{str(path)!r} cannot be read: {error}") from error

    def contents(self, wanted: Sequence[int], max_bytes: int) -> Readers:
        start = 0
        for group, rows in enumerate(self._group_rows):
            here = {index - start for index in wanted if 0 <= index - start < rows}
            start += rows
            if not here:
                continue
            batches = self._batches([group], [self._image])
            found = (row for batch in batches for row in batch)
            for index, (value,) in enumerate(found):
                if index in here:
                    data, _ = _image(value)
                    yield functools.partial(bytes, data[: max_bytes + 1])

    def _batches(
        self, groups: Sequence[int], columns: list[str]
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Yields the values of some columns, row by row, a few rows at a time."""
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(self._path) as file:
            for batch in file.iter_batches(_ROWS, groups, columns, use_threads=False):
                values = [batch.column(name).to_pylist() for name in columns]
                yield [*zip(*values, strict=True)]


def _columns(schema: Any) -> tuple[str, str, list[str] | None]:
    """Returns the columns of images and labels, and the names of the classes."""
    import pyarrow

    def holds_bytes(kind: Any) -> bool:
        if pyarrow.types.is_struct(kind):
            return kind.get_field_index("bytes") >= 0
        return pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)

    images = [field.name for field in schema if holds_bytes(field.type)]
    about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = about.get("info", {}).get("features", {})
    named = [name for name in schema.names if "names" in (features.get(name) or {})]
    label = named[0] if named else "label"
    if len(images) != 1 or label not in schema.names:
        raise ValueError(
            f"of its columns {', '.join(schema.names)}, one must hold images and one "
            "be called label"
        )
    return images[0], label, features[label]["names"] if named else None


def _image(value: Any) -> tuple[bytes, str]:
    """Returns the bytes of an image and its path; empty if there is none."""
    if isinstance(value, dict):
        return value["bytes"] or b"", value.get("path") or ""
    return value or b"", ""


def _class_name(value: Any, names: list[str] | None) -> str:
    """Returns the name of a class, which is the name of its folder."""
    if names is not None and value is not None:
        label = whole(value)
        if not (isinstance(label, int) and 0 <= label < len(names)):
            raise ValueError(f"label {label!r} is none of its {len(names)} classes")
        value = names[label]
    elif isinstance(value, float):
        value = whole(value)
    return "" if value is None else str(value).replace("/", "_")


def _entry(row: int, of_class: str, image: bytes, path: str) -> Entry:
    """Returns the file entry of a row."""
    suffix = PurePosixPath(path).suffix or ".png"
    name = str(PurePosixPath(of_class, f"{row:08}{suffix}"))
    if problem := name_problem(name):
        raise ValueError(f"class {of_class!r} {problem}")
    return Entry(name, len(image))
