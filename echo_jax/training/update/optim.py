"""Optimizers and learning rates: what is compiled, and the numbers that are not.

A study tries a thousand learning rates, and compiling takes minutes. So what decides
the structure of the program is an `Optimizer`, hashable and compiled in, and the
numbers (the learning rate and its schedule, momentum or b1 and b2, weight decay, the
norm to clip at) are arrays that the compiled step takes as inputs. Runs that differ in
these numbers alone share one compilation. Zero may be structure: without momentum
there is no buffer for it.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from echo_jax.config import Config
from echo_jax.config.batch import BatchGrowth
from echo_jax.config.optimizer import OWN_OPTIMIZERS, optax_factory
from echo_jax.training.update.large_batch import lamb, lars, rmsprop_warmup, sgd_share
from echo_jax.training.update.precision import in_float32
from echo_jax.training.update.schedules import (
    Numbers,
    learning_rate,
    schedule_numbers,
    share_of_rise,
)

__all__ = ["Hyperparams", "Optimizer", "hyperparams"]

_FLOATS = (
    "lr",
    "start_fraction",
    "end_fraction",
    "boundary_scale",
    "peak_at",
    "momentum",
    "peak_momentum",
    "b1",
    "b2",
    "eps",
    "weight_decay",
    "clip_norm",
    "trust_coefficient",
    "trust_clip",
)
_INTEGERS = (
    "warmup_updates",
    "decay_updates",
    "cycle_updates",
    "cooldown_updates",
    "transition_updates",
)
_CONSTANT = BatchGrowth()
_WITH_MOMENTUM = ("sgd", "lars", "rmsprop_warmup")


class Hyperparams(NamedTuple):
    """The numbers of an optimizer and of its schedule, side by side.

    A call of a compiled function takes 0.2 us for each array that it is given.

    Attributes:
      floats: ``float32[F]``.
      integers: ``int32[I]``.
      boundaries: See `echo_jax.training.update.schedules.Numbers`.
      fractions: See there.
    """

    floats: jax.Array
    integers: jax.Array
    boundaries: jax.Array
    fractions: jax.Array

    def by_name(self) -> Numbers:
        """Returns each by its name."""
        return {
            **{name: self.floats[k] for k, name in enumerate(_FLOATS)},
            **{name: self.integers[k] for k, name in enumerate(_INTEGERS)},
            "boundaries": self.boundaries,
            "fractions": self.fractions,
        }


def hyperparams(config: Config) -> Hyperparams:
    """Returns the numbers of a config that are inputs of the compiled step.

    With ``optim.scale=sqrt`` the means of Adam and LAMB forget faster in larger
    batches, and their eps is smaller (Malladi et al. 2022, section 5).

    Args:
      config: A checked training config.
    """
    optim = config.optim
    scaled = {name: optim[name] for name in ("b1", "b2", "eps")}
    if optim.scale == "sqrt":
        ratio = config.batch_size / optim.reference_batch
        scaled |= {name: 1 - ratio * (1 - scaled[name]) for name in ("b1", "b2")}
        scaled["eps"] /= math.sqrt(ratio)
    numbers = {**optim, **schedule_numbers(config), **scaled}
    return Hyperparams(
        jnp.asarray([numbers[name] for name in _FLOATS], jnp.float32),
        jnp.asarray([numbers[name] for name in _INTEGERS], jnp.int32),
        jnp.asarray(tuple(numbers["boundaries"]), jnp.int32),
        jnp.asarray(tuple(numbers["fractions"]), jnp.float32),
    )


class Delayed(NamedTuple):
    """The state of an optimizer whose gradients wait.

    Attributes:
      grads: Those of the last updates, the oldest first.
      state: Of the optimizer itself.
    """

    grads: tuple[Any, ...]
    state: Any


@dataclass(frozen=True)
class Optimizer:
    """What of an optimizer is compiled: all but its numbers.

    Hashable, so that runs with equal ones share one compiled step.

    Attributes:
      name: ``"adamw"``, ``"sgd"``, one of `echo_jax.training.update.large_batch`, or an
        optimizer of optax, such as ``"optax.contrib.muon"``.
      args: The further arguments of an optimizer of optax, as JSON. They are compiled
        in, since they may change the structure.
      schedule: See `echo_jax.training.update.schedules.learning_rate`.
      schedule_args: The arguments of a schedule of optax, as JSON.
      nesterov: Of SGD.
      decay_vectors: Whether biases, scales of norms and other vectors are decayed
        too, and not matrices and convolutions alone.
      has_momentum: Whether SGD, or what ends with it, keeps a buffer of gradients.
      has_decay: Whether SGD adds decayed parameters to the gradient (L2).
      clips: Whether gradients are clipped by their global norm.
      growth: Of the batch, where the rate grows with it.
      staleness: How many updates after its own a gradient is applied: simulated
        asynchronous SGD. In the first ones it is 0.
    """

    name: str
    args: str
    schedule: str
    schedule_args: str
    nesterov: bool
    decay_vectors: bool
    has_momentum: bool
    has_decay: bool
    clips: bool
    growth: BatchGrowth
    staleness: int

    @classmethod
    def from_config(cls, config: Config) -> "Optimizer":
        """Returns the optimizer of a checked training config.

        Fields that it does not use are left at one value, so that they cost no
        compilation.
        """
        optim = config.optim
        name, is_own = optim.name, optim.name in OWN_OPTIMIZERS
        has_momentum = name in _WITH_MOMENTUM and optim.momentum > 0
        return cls(
            name=name,
            args="{}" if is_own else optim.args,
            schedule=optim.schedule,
            schedule_args=optim.schedule_args,
            nesterov=name == "sgd" and has_momentum and optim.nesterov,
            decay_vectors=is_own and optim.decay_vectors,
            has_momentum=has_momentum,
            has_decay=name in ("sgd", "rmsprop_warmup") and optim.weight_decay > 0,
            clips=optim.clip_norm > 0,
            growth=BatchGrowth.of(config) if optim.scale == "linear" else _CONSTANT,
            staleness=config.local.staleness,
        )

    def init(self, params: Any) -> Any:
        """Returns the state before the first update: a pytree of float32 arrays."""
        # No state begins with a number of these, so that any will do.
        numbers = dict.fromkeys((*_FLOATS, "sgd_share"), 0.5)
        state = self._transformation(numbers).init(params)
        if not self.staleness:
            return state
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Delayed((zeros,) * self.staleness, state)

    def at(self, update: jax.Array | int, hyperparams: Hyperparams) -> Numbers:
        """Returns the numbers as they are at an update.

        Their ``lr`` is its learning rate. In ``onecycle`` momentum, or b1, falls to
        ``peak_momentum`` as the rate rises, and rises as it falls.

        Args:
          update: Updates done before, ``int32[]``.
          hyperparams: Of the run.
        """
        numbers = hyperparams.by_name()
        rate = learning_rate(self.schedule, numbers, update, args=self.schedule_args)
        for boundary, factor in self.growth.steps():
            rate = rate / jnp.where(update < boundary, factor, 1)
        share = sgd_share(update, numbers["transition_updates"])
        found = {**numbers, "lr": rate, "sgd_share": share}
        if self.schedule == "onecycle":
            rise = share_of_rise(numbers, update)
            for name in ("momentum", "b1"):
                low = jnp.minimum(numbers["peak_momentum"], numbers[name])
                found[name] = numbers[name] - (numbers[name] - low) * rise
        return found

    def update(
        self, grads: Any, state: Any, params: Any, numbers: Numbers
    ) -> tuple[Any, Any]:
        """Clips, decays and steps, all in float32.

        Args:
          grads: The gradient, a tree like the parameters.
          state: Of the optimizer.
          params: The parameters, of any floating-point type.
          numbers: Of this update, from `at`.

        Returns:
          What is to be added to the parameters, in float32, and the new state.
        """
        transformation = self._transformation(numbers)
        if not self.staleness:
            return transformation.update(grads, state, params)
        oldest, *later = *state.grads, grads
        changes, inner = transformation.update(oldest, state.state, params)
        return changes, Delayed(tuple(later), inner)

    def _transformation(self, numbers: Any) -> optax.GradientTransformation:
        matrices = None if self.decay_vectors else _matrices
        rate, decay = numbers["lr"], numbers["weight_decay"]
        momentum = numbers["momentum"] if self.has_momentum else None
        adam = {name: numbers[name] for name in ("b1", "b2", "eps")}
        parts = []
        if self.clips:
            parts.append(optax.clip_by_global_norm(numbers["clip_norm"]))
        if self.has_decay:
            parts.append(optax.add_decayed_weights(decay, matrices))
        match self.name:
            case "adamw":
                parts.append(
                    optax.adamw(rate, **adam, weight_decay=decay, mask=matrices)
                )
            case "sgd":
                parts.append(optax.sgd(rate, momentum, nesterov=self.nesterov))
            case "lars":
                coefficient = numbers["trust_coefficient"]
                parts.append(
                    lars(
                        rate,
                        momentum=momentum,
                        weight_decay=decay,
                        trust_coefficient=coefficient,
                        adapted=matrices or _all,
                    )
                )
            case "lamb":
                parts.append(
                    lamb(
                        rate,
                        **adam,
                        weight_decay=decay,
                        trust_clip=numbers["trust_clip"],
                        adapted=matrices or _all,
                    )
                )
            case "rmsprop_warmup":
                share = numbers["sgd_share"]
                parts.append(rmsprop_warmup(rate, momentum=momentum, share=share))
            case name:
                parts.append(_found(name, self.args)(rate))
        return in_float32(optax.chain(*parts))


# Trying an optimizer takes longer than finding it.
_found = functools.lru_cache(maxsize=32)(optax_factory)


def _all(params: optax.Params) -> optax.Params:
    """Returns that all parameters are adapted and decayed."""
    return jax.tree.map(lambda x: True, params)


def _matrices(params: optax.Params) -> optax.Params:
    """Returns which parameters have weight decay, if vectors have none."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)
