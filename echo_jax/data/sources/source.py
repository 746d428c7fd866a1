"""Where records come from: a prepared folder, or what others have made.

    data.source                       what is read
    FOLDER                            what `echo-jax prepare` has written
    tfds:NAME                         tensorflow-datasets
    hf:NAME, hf:FOLDER                Hugging Face datasets
    wds:FOLDER, wds:PATTERN           shards of WebDataset
    arrayrecord:FOLDER, :PATTERN      ArrayRecord files of one's own
    python:package.module:Class       a class of one's own

A workload asks for a split by its own word and for a kind of data; what it gets back
is the same dict for every example, wherever the records lie:

    kind      entries
    images    image: encoded bytes; label: int; name: str
    coco      image: encoded bytes, or uint8[H, W, 3]; image_id, height, width: int;
              boxes: float32 bytes [n, 4] (ymin, xmin, ymax, xmax in pixels);
              labels: int32 bytes [n]; crowd: uint8 bytes [n]; area: float32 bytes [n]
    text      tokens: bytes, from a prepared folder; text: bytes, from elsewhere
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from echo_jax.data.pipeline.stages import RecordSource
from echo_jax.data.sources.entries import DecodeRecord
from echo_jax.data.sources.prepared import open_prepared, read_info

__all__ = ["DescribedSource", "Kind", "Subset", "is_made_by_others", "open_source"]

Kind = Literal["images", "coco", "text"]

_SCHEMES = ("tfds", "hf", "wds", "arrayrecord", "python")
# What others call the split that a workload asks for, the best name first.
_ALSO_CALLED = {"validation": ("validation", "valid", "val", "test")}


class DescribedSource(RecordSource, Protocol):
    """Records that say what they are.

    Attributes:
      info: Plain data: ``kind``, ``splits``, and ``classes`` (names in the order of
        labels) or ``categories`` (``{"id", "name"}`` in the order of labels) where
        there are any; of a prepared folder, all of its ``dataset.json``.
    """

    @property
    def info(self) -> dict[str, Any]:
        """See the class."""
        ...

    def metadata(self) -> dict[str, Any]:
        """Returns what was read, for ``environment.json``."""
        ...


@dataclass(frozen=True)
class Subset:
    """Some of the records of a source.

    Attributes:
      source: All records.
      indices: Which of them, in this order.

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
      source: A prepared folder, or what others have made, see the module and the
        class for each; ``"tfds:NAME"`` has to be prepared as ``array_record``.
      split: The workload's word: ``"train"`` or ``"validation"``. Where there is no
        split of the name ``validation``, it is ``valid``, ``val`` or ``test``.
      kind: What the records must be.

    Returns:
      The records, and what turns one into the dict of its kind, see the module. Both
      pickle, and may be called from several threads.

    Raises:
      ValueError: If there is no such data, no such split, or it is of another kind.

    Example:
      >>> records, decode_record = open_source("data/cifar10", "train", "images")
      >>> decode_record(records[0])["label"]
      3
    """
    if is_made_by_others(source):
        data = _data_class(source)(source.partition(":")[2], kind)
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
    """Whether ``data.source`` names other data than a prepared folder or files.

    Example:
      >>> is_made_by_others("hf:rotten_tomatoes"), is_made_by_others("data/cifar10")
      (True, False)
    """
    scheme, colon, _ = source.partition(":")
    return bool(colon) and scheme in _SCHEMES


def _data_class(source: str) -> Any:
    """Imports what reads a source: each takes time or packages that others spare."""
    match source.partition(":")[0]:
        case "tfds":
            from echo_jax.data.sources.tfds import TfdsData

            return TfdsData
        case "hf":
            from echo_jax.data.sources.hf import HuggingFaceData

            return HuggingFaceData
        case "wds":
            from echo_jax.data.sources.wds import WebData

            return WebData
        case "arrayrecord":
            from echo_jax.data.sources.array_record import ArrayRecordData

            return ArrayRecordData
    from echo_jax.data.sources.python import PythonData

    return PythonData


def _split_of(source: str, wanted: str, splits: Iterable[str]) -> str:
    """Returns the name that a split has there."""
    splits = list(splits)
    for name in _ALSO_CALLED.get(wanted, (wanted,)):
        if name in splits:
            return name
    raise ValueError(
        f"data.source={source!r} has no split {wanted!r}; it has {', '.join(splits)}. "
        f"Name one with --config.data.train_split or eval_split, if the workload has "
        "them, or make one of that name."
    )
