"""Common parts of the sweeps: how a study starts, its variants, and its search."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from echo_jax.config import load_config
from echo_jax.config.study import default_study, set_arms

_CONFIGS = Path(__file__).parents[1]

_BASELINE = {"echo": {"factor": 1.0}}
# The paper's own shuffle buffer, which holds uses.
_SHUFFLED = {"echo": {"factor": 2.0, "order": "shuffle_buffer"}}
_PLACEMENTS = {
    "batch": {"echo": {"factor": 2.0, "stage": "batch", "buffer": 1}},
    "after": {"echo": {"factor": 2.0, "stage": "augment", "order": "shuffle_buffer"}},
    "before": _SHUFFLED,
    "example": _SHUFFLED,  # of text, which has no augmentation to be before
    "spread": {"echo": {"factor": 2.0, "order": "spread"}},
}


def check_variant(variant: str, known: tuple[str, ...]) -> None:
    """Refuses a variant that a sweep does not have; ``""`` is always one.

    Raises:
      ValueError: With those that there are.
    """
    if variant and variant not in known:
        names = ", ".join(known)
        raise ValueError(f"variant {variant!r} is unknown; use {names}, or none.")


def start_study(name: str, config: str, *, ratio: float = 0.0) -> ConfigDict:
    """Returns a study without variants.

    Args:
      name: Its title.
      config: The config of its runs, such as ``"cifar.py:tiny"``.
      ratio: R, to which reading is slowed down; 0 leaves it as it is.
    """
    base = load_config(str(_CONFIGS / config))
    return default_study(name, base, {}, storage_ratio=ratio)


def placement_arms(*names: str) -> dict[str, Any]:
    """Returns a baseline, and an echo of factor 2 at each of some places."""
    return {"baseline": _BASELINE, **{name: _PLACEMENTS[name] for name in names}}


def placement_study(
    name: str,
    config: str,
    variant: str,
    *,
    points: int,
    paper: Mapping[str, float],
    updates: Mapping[str, int],
    decay_updates: Sequence[int] = (),
) -> ConfigDict:
    """Returns a study of every placement: Choi et al. 2019, figure 3, and `spread`.

    Args:
      name: Its title.
      config: The file of the config of its runs, such as ``"cifar.py"``.
      variant: ``""`` or ``"tiny"``.
      points: Number of points of a search.
      paper: The paper's ratios of a variant's fresh examples to the baseline's.
      updates: Maximum updates of each variant that needs more than the base has. The
        drops of a piecewise learning rate move in proportion.
      decay_updates: Lengths of a linear decay to search over, if any.
    """
    check_variant(variant, ("tiny",))
    study = start_study(name, f"{config}:tiny" if variant else config)
    study.base.stop_at_target = True
    set_arms(study, placement_arms("batch", "after", "before", "spread"))
    for arm, most in () if variant else updates.items():
        study.arms[arm].updates = most
        if drops := study.base.optim.boundaries:
            scaled = tuple(at * most // study.base.updates for at in drops)
            study.arms[arm].optim = ConfigDict({"boundaries": scaled})
    search_like_paper(study, points, decay_updates=decay_updates, tiny=bool(variant))
    study.paper = ConfigDict(dict(paper))
    return study.lock()


def buffer_arms(
    name: str, batches: Sequence[int], items: Sequence[int]
) -> dict[str, Any]:
    """Returns a baseline, and an echo of factor 2 in buffers of several sizes.

    Args:
      name: The name of the echo of items: one of `placement_arms`.
      batches: Buffers of batches, counted in batches; 1 is batches back to back.
      items: Buffers of items.
    """
    arms = placement_arms()
    for size in batches:
        order = "consecutive" if size == 1 else "shuffle_buffer"
        echo = {**_PLACEMENTS["batch"]["echo"], "order": order, "buffer": size}
        arms[f"batch_{size}"] = {"echo": echo}
    for size in items:
        echo = {**_PLACEMENTS[name]["echo"], "buffer": size}
        arms[f"{name}_{size}"] = {"echo": echo}
    return arms


def factor_arms(updates: Mapping[int, int]) -> dict[str, Any]:
    """Returns a variant for each echo factor, with the updates that it may take.

    Args:
      updates: By factor; 0 for as many as the base has.
    """
    arms: dict[str, Any] = {}
    for factor, most in updates.items():
        name = "baseline" if factor == 1 else f"e{factor:02}"
        # Without an echo the order is that of the records, which are shuffled already.
        order = "consecutive" if factor == 1 else "shuffle_buffer"
        arms[name] = {"echo": {"factor": float(factor), "order": order}}
        if most:
            arms[name]["updates"] = most
    return arms


def byte_lm(
    batch_size: int = 32, *, updates: int = 0, tiny: bool = False
) -> ConfigDict:
    """Returns the config of a byte-level Transformer that trains in seconds on a core.

    Args:
      batch_size: Sequences of 32 bytes.
      updates: So many, and the last of eight evaluations counts; 0 trains to a target.
      tiny: Whether it is for a smoke test.
    """
    config = load_config(str(_CONFIGS / "quickstart.py:storage")).base
    config.batch_size = batch_size
    config.updates = 1600
    config.eval_every = config.log_every = 10
    config.target = 2.4
    config.echo.buffer = 512
    config.optim.warmup_updates = 20
    with config.unlocked():
        config.model.update({"seq_len": 32, "d_model": 32, "d_ff": 128})
    if tiny:
        config.updates, config.target = 60, 3.6
        config.data.eval_examples = 64
        config.echo.buffer = 64
    if updates:
        config.updates, config.eval_every = updates, updates // 8
        config.target, config.stop_at_target = 0.0, False
    return config


def small_resnet(batch_size: int = 64) -> ConfigDict:
    """Returns the config of a ResNet-8 of width 8 on CIFAR-10, to an accuracy of 45 %.

    Args:
      batch_size: Images.
    """
    config = load_config(str(_CONFIGS / "cifar.py:tiny"))
    config.batch_size = batch_size
    config.updates = 1600
    config.target = 0.45
    config.stop_at_target = True
    config.eval_every = config.log_every = 25
    config.optim.schedule = "constant"
    config.optim.warmup_updates = 25
    config.echo.buffer = 2000
    with config.unlocked():
        config.model.width = 8
    return config


def search_space(study: ConfigDict, *, tiny: bool = False) -> None:
    """Sets how the variants of a study are searched and confirmed, by their optimizer.

    The spaces began as those of AlgoPerf's archived searches. In a pilot (8 points, one
    search) the best momenta lay at their lower edge, so that they were moved.

    Args:
      study: From `echo_jax.config.study.default_study`.
      tiny: Whether it is for a smoke test.
    """
    spaces = {
        "adamw": {"lr": "log:5e-4:3e-2", "b1": "log1m:0.05:0.8"},
        "sgd": {"lr": "log:0.01:2", "momentum": "log1m:0.02:0.5"},
    }
    study.search.space = ConfigDict({"optim": spaces[study.base.optim.name]})
    study.search.points, study.search.repeats = (2, 2) if tiny else (16, 3)
    study.confirm.streams = 2 if tiny else 8


def tiny_target(study: ConfigDict) -> None:
    """Sets a loss that the small run on bytes, ``lm.py:tiny``, reaches."""
    study.base.target, study.base.stop_at_target = 3.9, True
    study.base.eval_every = 10


def search_like_paper(
    study: ConfigDict,
    points: int,
    *,
    repeats: int = 5,
    streams: int = 1,
    decay_updates: Sequence[int] = (),
    tiny: bool = False,
) -> None:
    """Sets the search of Choi et al. 2019, section 3: every variant tuned, five times.

    The paper states no ranges. Here the learning rate is within a factor of 16 of the
    config's, and 1 - momentum is between 0.01 and 0.5.

    Args:
      study: From `start_study`, with its base complete.
      points: Number of points of a search; the paper took 100 or 50.
      repeats: Number of searches of each variant.
      streams: Number of new seeds on which the best point of each search is trained.
      decay_updates: Lengths of a linear decay to search over, if any.
      tiny: Whether it is for a smoke test.
    """
    optim = study.base.optim
    space = {
        "lr": f"log:{optim.lr / 16:g}:{optim.lr * 16:g}",
        "b1" if optim.name == "adamw" else "momentum": "log1m:0.01:0.5",
    }
    if decay_updates and not tiny:
        space["decay_updates"] = "choice:" + ",".join(map(str, decay_updates))
    study.search.space = ConfigDict({"optim": space})
    study.search.points, study.search.repeats = (2, 1) if tiny else (points, repeats)
    study.confirm.streams = 1 if tiny else streams


def less_than(
    variant: str, other: str, says: str, bound: float = 1.0
) -> dict[str, Any]:
    """Returns the prediction that a variant of the study does not need fewer examples.

    Args:
      variant: The variant whose fresh examples are counted.
      other: The variant with which it is compared.
      says: The meaning of the result that refutes the prediction.
      bound: The prediction: the least ratio of the variant's fresh examples to the
        other's. Without a target: the least difference of their last values.
    """
    return {"says": says, "arm": variant, "over": other, "below": bound}
