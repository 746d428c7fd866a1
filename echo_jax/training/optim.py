"""Optimizers and learning-rate schedules, from hashable settings to optax."""

from dataclasses import dataclass, fields

import jax
import optax

from echo_jax.config import Config

__all__ = ["OptimSettings", "make_optimizer", "make_schedule"]


@dataclass(frozen=True)
class OptimSettings:
    """What determines an optimizer; ``config.optim``, with no default left open.

    Hashable, so that runs with equal settings share one compiled step.

    Attributes:
      name: ``"adamw"`` or ``"sgd"``.
      lr: The peak learning rate.
      schedule: ``"constant"``, ``"linear"``, ``"cosine"`` or ``"piecewise"``.
      warmup_updates: Updates in which the learning rate rises linearly; the last
        of them is the first at the peak.
      decay_updates: The update that trains with ``end_fraction`` of the peak, and
        so do all after it; 0 for a schedule without such an end.
      end_fraction: See `decay_updates`.
      boundaries: Of a piecewise schedule: after so many updates the learning rate
        is multiplied by `boundary_scale`; ``()`` for the other schedules.
      boundary_scale: See `boundaries`.
      momentum: Of SGD.
      nesterov: Of SGD.
      b1: Of AdamW.
      b2: Of AdamW.
      weight_decay: AdamW decays the parameters, SGD adds it to the gradient (L2).
      decay_vectors: Whether biases, scales of norms and other vectors are decayed
        too, and not matrices and convolutions alone.
      clip_norm: Largest global norm of the gradient; 0 does not clip.
    """

    name: str
    lr: float
    schedule: str
    warmup_updates: int
    decay_updates: int
    end_fraction: float
    boundaries: tuple[int, ...]
    boundary_scale: float
    momentum: float
    nesterov: bool
    b1: float
    b2: float
    weight_decay: float
    decay_vectors: bool
    clip_norm: float

    @classmethod
    def from_config(cls, config: Config) -> "OptimSettings":
        """Returns the settings of a checked training config."""
        settings = {field.name: config.optim[field.name] for field in fields(cls)}
        # A constant schedule does not depend on the length of the run, so runs of
        # any length share a compilation.
        decays = config.optim.schedule in ("linear", "cosine")
        decay_updates = config.optim.decay_updates or config.updates
        settings["decay_updates"] = decay_updates if decays else 0
        return cls(**settings)


def make_schedule(settings: OptimSettings) -> optax.Schedule:
    """Returns the learning rate as a function of the updates done before.

    Args:
      settings: The settings.

    Returns:
      A function of ``int32[]``, 0 for the first update.

    Example:
      A linear schedule with lr 1, 2 warm-up updates of 6, and end fraction 0.2
      trains its updates with 0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2, ...
    """
    # Counted so that neither end is lost: no update trains with a rate of 0, and
    # the peak and the end are each met by an update.
    warm = max(settings.warmup_updates - 1, 0)
    decay = max(settings.decay_updates - 1 - warm, 1)
    lr, end = settings.lr, settings.lr * settings.end_fraction
    match settings.schedule:
        case "constant":
            after = optax.constant_schedule(lr)
        case "linear":
            after = optax.linear_schedule(lr, end, decay)
        case "cosine":
            after = optax.cosine_decay_schedule(lr, decay, settings.end_fraction)
        case "piecewise":
            # Joined to the warm-up, a schedule counts from the warm-up's end on.
            scales = {b - warm: settings.boundary_scale for b in settings.boundaries}
            after = optax.piecewise_constant_schedule(lr, scales)
        case unknown:
            raise ValueError(
                f"schedule={unknown!r} is unknown; use constant, linear, cosine or "
                "piecewise"
            )
    if not warm:
        return after
    before = optax.linear_schedule(lr / settings.warmup_updates, lr, warm)
    return optax.join_schedules([before, after], [warm])


def make_optimizer(settings: OptimSettings) -> optax.GradientTransformation:
    """Returns the optimizer: clip, then decay and step.

    Args:
      settings: The settings.

    Returns:
      An optax transformation whose state is a pytree of arrays.

    Raises:
      ValueError: The optimizer or the schedule is unknown.
    """
    schedule = make_schedule(settings)
    decayed = None if settings.decay_vectors else _matrices
    parts = []
    if settings.clip_norm:
        parts.append(optax.clip_by_global_norm(settings.clip_norm))
    match settings.name:
        case "adamw":
            parts.append(
                optax.adamw(
                    schedule,
                    b1=settings.b1,
                    b2=settings.b2,
                    weight_decay=settings.weight_decay,
                    mask=decayed,
                )
            )
        case "sgd":
            if settings.weight_decay:
                parts.append(optax.add_decayed_weights(settings.weight_decay, decayed))
            # A momentum of 0 would keep a second copy of the parameters for nothing.
            momentum = settings.momentum or None
            parts.append(optax.sgd(schedule, momentum, nesterov=settings.nesterov))
        case unknown:
            raise ValueError(f"optimizer {unknown!r} is unknown; use adamw or sgd")
    return optax.chain(*parts)


def _matrices(params: optax.Params) -> optax.Params:
    """Returns which parameters have weight decay, if vectors have none."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)
