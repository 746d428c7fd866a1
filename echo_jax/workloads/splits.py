"""The training split and the evaluation split of a run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from echo_jax.data.pipeline.evaluation import sample_indices
from echo_jax.data.pipeline.stages import RecordSource
from echo_jax.data.sources.source import DescribedSource, Kind, Subset, open_source

__all__ = ["Splits", "limited", "open_splits"]


@dataclass(frozen=True)
class Splits:
    """The two splits of a run.

    Attributes:
      evaluation: The records to evaluate, from `evaluation_source`.
      decode_record: Decodes a record of either split to a dict.
      metadata: A description of the data, for ``environment.json``.
    """

    train: RecordSource
    evaluation: RecordSource
    evaluation_source: DescribedSource
    decode_record: Callable[[Any], dict[str, Any]]
    metadata: Mapping[str, Any]

    @property
    def info(self) -> dict[str, Any]:
        return self.evaluation_source.info


# If both splits are the same one, ``data.train_examples`` limits the evaluation too.
def open_splits(config: Any, kind: Kind) -> Splits:
    """Opens the splits of ``config.data``, whose records must be of `kind`."""
    data = config.data
    source, decode_record = open_source(data.source, data.train_split, kind)
    train = limited(source, data.train_examples, data.train_split)
    if data.eval_split == data.train_split:
        evaluation_source, evaluation = source, train
    else:
        evaluation_source, _ = open_source(data.source, data.eval_split, kind)
        evaluation = evaluation_source
    return Splits(
        train=train,
        evaluation=evaluation,
        evaluation_source=evaluation_source,
        decode_record=decode_record,
        metadata={
            "synthetic": False,
            "train_examples": len(train),
            "train": source.metadata(),
            "evaluation": evaluation_source.metadata(),
        },
    )


def limited(source: RecordSource, wanted: int, split: str) -> RecordSource:
    """Returns always the same `wanted` examples of a source, or all for 0."""
    if not 0 <= wanted <= len(source):
        raise ValueError(
            f"data.train_examples={wanted} is none of 0 to {len(source)}, which split "
            f"{split!r} has; set --config.data.train_examples=0 for all."
        )
    if not wanted:
        return source
    return Subset(source, sample_indices(len(source), wanted))
