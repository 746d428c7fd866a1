"""The fields of a study: the variants that are compared, and their search."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ml_collections import ConfigDict

from echo_jax.config.defaults import Config, check_field
from echo_jax.config.group import Amount, Count, Group, Natural, defaults_of, described
from echo_jax.config.run import RunSpec
from echo_jax.config.workloads import FIELDS
from echo_jax.studies.fields import flat_fields


@dataclass(frozen=True)
class SearchSpec(Group):
    """The search of every variant."""

    # Searched fields of the base, nested: {"optim": {"lr": "log:1e-4:1e-2"}}.
    # Without any, the variants keep their configs.
    space: Any = field(default_factory=dict)
    points: Count = 16  # points of a search; powers of two fill a space best
    repeats: Count = 5  # independent searches of each variant
    seed: Natural = 0  # of the points


@dataclass(frozen=True)
class ConfirmSpec(Group):
    """The trainings that confirm a search."""

    # Number of new seeds (data, initial values, dropout) with which the best point of
    # each search is trained. Without a search, the number of seeds of every variant;
    # 0: each variant is one run.
    streams: Natural = 0


@dataclass(frozen=True)
class StopSpec(Group):
    """When a trial ends early."""

    # A search's trial ends at this multiple of the updates of the best earlier trial;
    # 0: it does not.
    cut: Amount = 2.0

    def __post_init__(self):
        super().__post_init__()
        if 0 < self.cut < 1:
            self.refuse("cut", "would end the best trials", 2.0)


@dataclass(frozen=True)
class StudySpec(Group):
    """A study; ``base`` is a training config, and the variants differ from it."""

    name: str = ""  # the title
    storage_ratio: float = 0.0  # R, to which reading is slowed down; 0 leaves it
    search: SearchSpec = field(default_factory=SearchSpec)
    confirm: ConfirmSpec = field(default_factory=ConfirmSpec)
    stop: StopSpec = field(default_factory=StopSpec)
    order: tuple[str, ...] = ()  # the names of the variants, as they run
    # Predictions, written before the trials. A change is refused once there are trials.
    # Each is a dict of says (the meaning, if refuted), arm and over (two variants), and
    # below (the bound that refutes it); see `echo_jax.searches.comparison.Prediction`.
    falsifiers: tuple[Any, ...] = ()
    # Published ratios of a variant's fresh examples to the baseline's. Without a
    # target: published differences of the last value from the baseline's.
    paper: Any = field(default_factory=dict)


def default_study(
    name: str, base: Config, arms: Mapping[str, Any], *, storage_ratio: float = 0.0
) -> Config:
    """Returns a study, unlocked.

    Args:
      name: The title of the study.
      base: A training config.
      arms: For each name, the differences from the base. They run in this order.
      storage_ratio: R, to which reading is slowed down; 0 does not change it.

    Example:
      >>> from echo_jax.config import default_config
      >>> arms = {"baseline": {}, "batch": {"echo": {"factor": 2.0}}}
      >>> study = default_study("Batch echoing", default_config(), arms)
      >>> study.search.space = ConfigDict({"optim": {"lr": "log:1e-4:1e-2"}})
    """
    study = ConfigDict(defaults_of(StudySpec))
    study.name, study.storage_ratio, study.base = name, storage_ratio, base
    set_arms(study, arms)
    return study


def set_arms(study: Config, arms: Mapping[str, Any]) -> None:
    """Sets the variants of a study, in the order in which they run.

    Args:
      study: The study, unlocked.
      arms: For each name, the differences from the base.

    Raises:
      ValueError: A name has a dot.
    """
    study.arms = ConfigDict(dict(arms))
    study.order = tuple(arms)  # A config sorts its fields.


def sweep_of(
    config: Config, over: Mapping[str, str], *, name: str, points: int, streams: int
) -> Config:
    """Returns the study that searches for the best values of one config's fields.

    Args:
      config: A training config.
      over: The tried values of each field, by its dotted name: ``log:1e-4:1e-2``.
      name: The title of the study.
      points: Number of points to try.
      streams: Number of new seeds with which the best point is trained again.

    Raises:
      ValueError: `over` is empty or names an unknown field; or `config` is a study.

    Example:
      >>> from echo_jax.config import default_config
      >>> over = {"optim.lr": "log:1e-4:1e-2"}
      >>> sweep_of(default_config(), over, name="lr", points=8, streams=3).search.points
      8
    """
    if "arms" in config:
        raise ValueError("this config is a study already; run it with 'echo-jax study'")
    if not over:
        raise ValueError("there is nothing to try; add --over FIELD=log:LOW:HIGH")
    study = default_study(name, config, {"baseline": {}})
    space: dict[str, Any] = {}
    for dotted, text in over.items():
        check_field(config, dotted)
        group = space
        *groups, last = dotted.split(".")
        for part in groups:
            group = group.setdefault(part, {})
        group[last] = text
    study.search.space = ConfigDict(space)
    study.search.points, study.search.repeats = points, 1
    study.confirm.streams = streams
    return study.lock()


def arm_names(study: Config) -> list[str]:
    """Returns the names of a study's variants, in the order in which they run.

    Variants that are not in the order, such as variants added later, come last.
    """
    names = list(study.arms)
    ordered = [name for name in study.get("order", ()) if name in names]
    return [*ordered, *(name for name in names if name not in ordered)]


def field_lines(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the flag and the description of every field of a training or a study."""
    is_study = "base" in config
    workload = config.base.workload if is_study else config.workload
    of_run, of_study = dict(described(RunSpec)), dict(described(StudySpec))
    # A workload of somebody else has no texts for its fields.
    if workload in FIELDS:
        model, data = FIELDS[workload]
        of_run |= {**dict(described(model, "model.")), **dict(described(data, "data."))}
    for name, value in flat_fields(config.to_dict()).items():
        own = re.sub(r"^(base|arms\.[^.]+)\.", "", name)
        about = of_study if is_study and own == name else of_run
        yield f"--config.{name}={value}", about.get(own, "")
