"""Opens record sources: prepared folders and third-party datasets.

    data.source                       source
    FOLDER                            output of `echo-jax prepare`
    tfds:NAME                         tensorflow-datasets
    hf:NAME, hf:FOLDER                Hugging Face datasets
    wds:FOLDER, wds:PATTERN           shards of WebDataset
    arrayrecord:FOLDER, :PATTERN      the user's own ArrayRecord files
    python:package.module:Class       the user's own class

A workload asks for a split and a kind of data. Every example is a dict with the same
entries, whatever the source:

    kind      entries
    images    image: encoded bytes; label: int; name: str
    coco      image: encoded bytes, or uint8[H, W, 3]; image_id, height, width: int;
              boxes: float32 bytes [n, 4] (ymin, xmin, ymax, xmax in pixels);
              labels: int32 bytes [n]; crowd: uint8 bytes [n]; area: float32 bytes [n]
    text      tokens: bytes, from a prepared folder; text: bytes, from other sources
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from echo_jax.data.pipeline.stages import RecordSource
from echo_jax.data.sources.foreign_records import DecodeRecord
from echo_jax.data.sources.prepared import open_prepared, read_info

Kind = Literal["images", "coco", "text"]

# The module and the class of each scheme; imports take time or extra packages.
_SCHEMES = {
    "tfds": ("tfds", "TfdsData"),
    "hf": ("hf", "HuggingFaceData"),
    "wds": ("wds", "WebData"),
    "arrayrecord": ("array_record", "ArrayRecordData"),
    "python": ("python", "PythonData"),
}
# The names that sources give to a split, the best name first.
_ALSO_CALLED = {"validation": ("validation", "valid", "val", "test")}


class DescribedSource(RecordSource, Protocol):
    """Records with a description.

    Attributes:
      info: JSON values: ``kind``, ``splits``, and, where they exist, ``classes``
        (names in label order) or ``categories`` (``{"id", "name"}`` in label order).
        A prepared folder gives its complete ``dataset.json``.
    """

    @property
    def info(self) -> dict[str, Any]:
        """The description of the records; see the class."""
        ...

    def metadata(self) -> dict[str, Any]:
        """Returns the facts about the source, for ``environment.json``."""
        ...


@dataclass(frozen=True)
class Subset:
    """Some of the records of a source.

    Attributes:
      source: All records.
      indices: The indices of the records to use, in this order.

    Example:
      >>> Subset([b"ab", b"cd", b"ef"], (2, 0))[0]
      b'ef'
    """

    source: RecordSource
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> bytes:
        return self.source[self.indices[index]]


def open_source(
    source: str, split: str, kind: Kind
) -> tuple[DescribedSource, Callable[[bytes], dict[str, Any]]]:
    """Opens a split of the data that ``data.source`` names.

    Args:
      source: A prepared folder or a third-party dataset, see the module.
        ``"tfds:NAME"`` must be prepared as ``array_record``.
      split: ``"train"`` or ``"validation"``. If the source has no split
        ``validation``, it is ``valid``, ``val`` or ``test``.
      kind: The kind of the records.

    Returns:
      The records, and a function that turns a record into the dict of its kind, see
      the module. Both can be pickled, and called from several threads.

    Raises:
      ValueError: The data or the split does not exist, or is of another kind.

    Example:
      >>> records, decode_record = open_source("data/cifar10", "train", "images")
      >>> decode_record(records[0])["label"]
      3
    """
    if is_made_by_others(source):
        scheme, _, name = source.partition(":")
        if kind == "coco" and scheme not in ("tfds", "python"):
            raise ValueError(
                f"data.source={source!r} has images or text; scenes are read from what "
                "`echo-jax prepare coco` has made."
            )
        module, reader = _SCHEMES[scheme]
        found = importlib.import_module(f"echo_jax.data.sources.{module}")
        data = getattr(found, reader)(name, kind)
        return data.open(_split_of(source, split, data.splits))
    if not source:
        raise ValueError(
            "data.source is empty; name a folder that `echo-jax prepare` has written, "
            "as in --config.data.source=data/cifar10, or tfds:NAME."
        )
    info = read_info(source)
    if info["kind"] != kind:
        raise ValueError(
            f"data.source={source!r} holds {info['kind']}, and this workload reads "
            f"{kind}; prepare such data with `echo-jax prepare {kind}`."
        )
    records = open_prepared(source, _split_of(source, split, info["splits"]))
    return records, DecodeRecord(kind)


def is_made_by_others(source: str) -> bool:
    """Returns whether ``data.source`` names a third-party dataset or a user's class.

    Example:
      >>> is_made_by_others("hf:rotten_tomatoes"), is_made_by_others("data/cifar10")
      (True, False)
    """
    scheme, colon, _ = source.partition(":")
    return bool(colon) and scheme in _SCHEMES


def _split_of(source: str, wanted: str, splits: Iterable[str]) -> str:
    """Returns the source's own name of a split."""
    splits = list(splits)
    for name in _ALSO_CALLED.get(wanted, (wanted,)):
        if name in splits:
            return name
    raise ValueError(
        f"data.source={source!r} has no split {wanted!r}; it has {', '.join(splits)}. "
        f"Name one with --config.data.train_split or eval_split, if the workload has "
        "them, or make one of that name."
    )
