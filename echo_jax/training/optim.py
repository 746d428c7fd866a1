"""Optimizers and learning rates: what is compiled, and the numbers that are not.

A study tries a thousand learning rates, and compiling takes minutes. So what decides
the structure of the program is an `Optimizer`, hashable and compiled in, and the
numbers (the learning rate and its schedule, momentum or b1 and b2, weight decay, the
norm to clip at) are arrays that the compiled step takes as inputs. Runs that differ in
these numbers alone share one compilation. Zero may be structure: without momentum
there is no buffer for it.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from echo_jax.config import Config
from echo_jax.config_optimizer import OWN_OPTIMIZERS, optax_factory

__all__ = ["Hyperparams", "Optimizer", "hyperparams", "learning_rate"]

Hyperparams = dict[str, jax.Array]
"""The numbers of an optimizer by name, ``float32[]`` or ``int32[]``; ``boundaries`` is
``int32[N]``."""

_FLOATS = (
    "lr",
    "end_fraction",
    "boundary_scale",
    "momentum",
    "b1",
    "b2",
    "weight_decay",
    "clip_norm",
)


def hyperparams(config: Config) -> Hyperparams:
    """Returns the numbers of a config that are inputs of the compiled step.

    Args:
      config: A checked training config.
    """
    optim = config.optim
    # Weakly typed, as Python's numbers are: they leave the type of what they meet.
    numbers = {name: jnp.asarray(float(optim[name])) for name in _FLOATS}
    return {
        **numbers,
        "warmup_updates": jnp.asarray(optim.warmup_updates),
        "decay_updates": jnp.asarray(optim.decay_updates or config.updates),
        "boundaries": jnp.asarray(tuple(optim.boundaries), jnp.int32),
    }


def learning_rate(
    schedule: str, numbers: Hyperparams, update: jax.Array | int
) -> jax.Array:
    """Returns the learning rate of an update, ``float32[]``.

    No update trains with a rate of 0, and the peak and the end are each met by an
    update: the warm-up's last update is the first at the peak.

    Args:
      schedule: ``"constant"``, ``"linear"``, ``"cosine"`` or ``"piecewise"``.
      numbers: From `hyperparams`.
      update: Updates done before, ``int32[]``: 0 for the first.

    Example:
      A linear schedule with lr 1, 2 warm-up updates of 6, and end fraction 0.2
      trains its updates with 0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2, ...
    """
    warmup, end = numbers["warmup_updates"], numbers["end_fraction"]
    last_warm = jnp.maximum(warmup - 1, 0)
    length = jnp.maximum(numbers["decay_updates"] - 1 - last_warm, 1)
    done = jnp.clip((update - last_warm) / length, 0.0, 1.0)
    match schedule:
        case "constant":
            scale = jnp.ones(())
        case "linear":
            scale = (1 - end) * (1 - done) + end
        case "cosine":
            scale = (1 - end) * 0.5 * (1 + jnp.cos(jnp.pi * done)) + end
        case "piecewise":
            passed = (update >= numbers["boundaries"]).sum()
            scale = numbers["boundary_scale"] ** passed
        case unknown:
            raise ValueError(
                f"schedule={unknown!r} is unknown; use constant, linear, cosine or "
                "piecewise"
            )
    rising = (update + 1) / jnp.maximum(warmup, 1)
    scale = jnp.where(update < last_warm, rising, scale)
    return (numbers["lr"] * scale).astype(jnp.float32)


@dataclass(frozen=True)
class Optimizer:
    """What of an optimizer is compiled: all but its numbers.

    Hashable, so that runs with equal ones share one compiled step.

    Attributes:
      name: ``"adamw"``, ``"sgd"``, or an optimizer of optax, such as
        ``"optax.contrib.muon"``.
      args: The further arguments of an optimizer of optax, as JSON. They are compiled
        in, since they may change the structure.
      schedule: See `learning_rate`.
      nesterov: Of SGD.
      decay_vectors: Whether biases, scales of norms and other vectors are decayed
        too, and not matrices and convolutions alone.
      has_momentum: Whether SGD keeps a buffer of gradients.
      has_decay: Whether SGD adds decayed parameters to the gradient (L2).
      clips: Whether gradients are clipped by their global norm.
    """

    name: str
    args: str
    schedule: str
    nesterov: bool
    decay_vectors: bool
    has_momentum: bool
    has_decay: bool
    clips: bool

    @classmethod
    def from_config(cls, config: Config) -> "Optimizer":
        """Returns the optimizer of a checked training config.

        Fields that it does not use are left at one value, so that they cost no
        compilation.
        """
        optim = config.optim
        is_sgd, is_own = optim.name == "sgd", optim.name in OWN_OPTIMIZERS
        return cls(
            name=optim.name,
            args="{}" if is_own else optim.args,
            schedule=optim.schedule,
            nesterov=is_sgd and optim.momentum > 0 and optim.nesterov,
            decay_vectors=is_own and optim.decay_vectors,
            has_momentum=is_sgd and optim.momentum > 0,
            has_decay=is_sgd and optim.weight_decay > 0,
            clips=optim.clip_norm > 0,
        )

    def init(self, params: Any) -> Any:
        """Returns the state before the first update: a pytree of arrays."""
        # No state begins with a number of these, so that any will do.
        numbers = dict.fromkeys(_FLOATS, 0.5)
        return self._transformation(numbers, 0.5).init(params)

    def update(
        self, grads: Any, state: Any, params: Any, numbers: Hyperparams, rate: Any
    ) -> tuple[Any, Any]:
        """Clips, decays and steps.

        Args:
          grads: The gradient, a tree like the parameters.
          state: Of the optimizer.
          params: The parameters.
          numbers: From `hyperparams`.
          rate: From `learning_rate`.

        Returns:
          What is to be added to the parameters, and the new state.
        """
        return self._transformation(numbers, rate).update(grads, state, params)

    def _transformation(self, numbers: Any, rate: Any) -> optax.GradientTransformation:
        decayed = None if self.decay_vectors else _matrices
        parts = []
        if self.clips:
            parts.append(optax.clip_by_global_norm(numbers["clip_norm"]))
        match self.name:
            case "adamw":
                parts.append(
                    optax.adamw(
                        rate,
                        b1=numbers["b1"],
                        b2=numbers["b2"],
                        weight_decay=numbers["weight_decay"],
                        mask=decayed,
                    )
                )
            case "sgd":
                if self.has_decay:
                    decay = numbers["weight_decay"]
                    parts.append(optax.add_decayed_weights(decay, decayed))
                momentum = numbers["momentum"] if self.has_momentum else None
                parts.append(optax.sgd(rate, momentum, nesterov=self.nesterov))
            case name:
                parts.append(_found(name, self.args)(rate))
        return optax.chain(*parts)


# Trying an optimizer takes longer than finding it.
_found = functools.lru_cache(maxsize=32)(optax_factory)


def _matrices(params: optax.Params) -> optax.Params:
    """Returns which parameters have weight decay, if vectors have none."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)
