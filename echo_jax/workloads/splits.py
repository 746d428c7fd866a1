"""The two splits of a run: what is trained on, and what is evaluated."""

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
      train: Records to be trained on.
      evaluation: Records to be evaluated on.
      evaluation_source: All records of the split that those are from.
      decode_record: Makes the dict of their kind out of a record of either.
      metadata: What was read, for ``environment.json``.
    """

    train: RecordSource
    evaluation: RecordSource
    evaluation_source: DescribedSource
    decode_record: Callable[[Any], dict[str, Any]]
    metadata: Mapping[str, Any]

    @property
    def info(self) -> dict[str, Any]:
        """See `DescribedSource`; it is the same for both."""
        return self.evaluation_source.info


def open_splits(config: Any, kind: Kind) -> Splits:
    """Opens the data of a workload.

    Args:
      config: ``data.source`` as `open_source` takes it; ``data.train_split`` and
        ``data.eval_split``, such as ``"train"`` and ``"validation"``;
        ``data.train_examples``, of which a run knows no others (always the same ones;
        0 for all), also where both splits are one.
      kind: What the records must be.

    Returns:
      The splits.

    Raises:
      ValueError: If the data or a split is not there, is of another kind, or has fewer
        examples than asked for.
    """
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
    """Returns some examples of a source, always the same ones, or the source itself.

    Args:
      source: Of training examples.
      wanted: ``data.train_examples``; 0 for all.
      split: Its name.

    Raises:
      ValueError: It has fewer.
    """
    if not 0 <= wanted <= len(source):
        raise ValueError(
            f"data.train_examples={wanted} is none of 0 to {len(source)}, which split "
            f"{split!r} has; set --config.data.train_examples=0 for all."
        )
    if not wanted:
        return source
    return Subset(source, sample_indices(len(source), wanted))
