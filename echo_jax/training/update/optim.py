"""Optimizers and learning rates: a compiled structure, and numbers that are inputs.

A study tries a thousand learning rates, and compiling takes minutes. So an `Optimizer`
decides the structure of the program; it is hashable and compiled in. The numbers are
arrays that the compiled step takes as inputs: the learning rate and its schedule,
momentum or b1 and b2, weight decay, and the norm to clip at. Runs that differ only in
these numbers share one compilation. A zero may change the structure: without momentum,
no buffer is needed for it.
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
from echo_jax.training.update.schedules import (
    Numbers,
    learning_rate,
    schedule_numbers,
    share_of_rise,
)

__all__ = ["Hyperparams", "Optimizer", "hyperparams"]

_FLOATS = ("lr", "start_fraction", "end_fraction", "boundary_scale", "peak_at")
_FLOATS += ("momentum", "peak_momentum", "b1", "b2", "eps", "weight_decay", "clip_norm")
_FLOATS += ("trust_coefficient", "trust_clip")
_INTEGERS = ("warmup_updates", "decay_updates", "cycle_updates", "cooldown_updates")
_INTEGERS += ("transition_updates",)
_CONSTANT = BatchGrowth()
_WITH_MOMENTUM = ("sgd", "lars", "rmsprop_warmup")


# A call of a compiled function takes 0.2 us for each array that it is given.
class Hyperparams(NamedTuple):
    """The numbers of an optimizer and of its schedule, in few arrays."""

    floats: jax.Array  # float32[F], in the order of _FLOATS.
    integers: jax.Array  # int32[I], in the order of _INTEGERS.
    boundaries: jax.Array  # int32[N]
    fractions: jax.Array  # float32[M]

    def by_name(self) -> Numbers:
        return {
            **{name: self.floats[k] for k, name in enumerate(_FLOATS)},
            **{name: self.integers[k] for k, name in enumerate(_INTEGERS)},
            "boundaries": self.boundaries,
            "fractions": self.fractions,
        }


def hyperparams(config: Config) -> Hyperparams:
    """Returns the numbers of a config that are inputs of the compiled step."""
    optim = config.optim
    scaled = {name: optim[name] for name in ("b1", "b2", "eps")}
    # In larger batches, the means of Adam and LAMB forget faster, and their eps is
    # smaller (Malladi et al. 2022, section 5).
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
    """The state of an optimizer, and the gradients that wait, oldest first."""

    grads: tuple[Any, ...]
    state: Any


@dataclass(frozen=True)
class Optimizer:
    """The compiled part of an optimizer: all but its numbers; hashable.

    Attributes:
      args: JSON arguments of an optax optimizer; they may change the structure.
      decay_vectors: Whether biases, norm scales and other vectors are decayed too.
      has_decay: Whether SGD adds decayed parameters to the gradient (L2).
      growth: The growth of the batch that the learning rate follows.
      staleness: How many updates after its own a gradient is applied, as in
        asynchronous SGD.
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
        optim = config.optim
        name, is_own = optim.name, optim.name in OWN_OPTIMIZERS
        has_momentum = name in _WITH_MOMENTUM and optim.momentum > 0
        # Unused fields have one fixed value, so that they cost no compilation.
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
        # The first state does not depend on these numbers, so any will do.
        numbers = dict.fromkeys((*_FLOATS, "sgd_share"), 0.5)
        state = self._transformation(numbers).init(_as_float32(params))
        if not self.staleness:
            return state
        # The first updates apply gradients of 0.
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Delayed((zeros,) * self.staleness, state)

    def at(self, update: jax.Array | int, hyperparams: Hyperparams) -> Numbers:
        """Returns the numbers of an update; ``lr`` is its learning rate."""
        numbers = hyperparams.by_name()
        rate = learning_rate(self.schedule, numbers, update, args=self.schedule_args)
        for boundary, factor in self.growth.steps():
            rate = rate / jnp.where(update < boundary, factor, 1)
        share = sgd_share(update, numbers["transition_updates"])
        found = {**numbers, "lr": rate, "sgd_share": share}
        # Momentum, or b1, falls to its peak value as the rate rises, and then rises.
        if self.schedule == "onecycle":
            rise = share_of_rise(numbers, update)
            for name in ("momentum", "b1"):
                low = jnp.minimum(numbers["peak_momentum"], numbers[name])
                found[name] = numbers[name] - (numbers[name] - low) * rise
        return found

    def update(
        self, grads: Any, state: Any, params: Any, numbers: Numbers
    ) -> tuple[Any, Any]:
        """Clips, decays and steps in float32; returns the changes and the new state."""
        # In half precision the norm of a gradient under- or overflows: in float16 the
        # square of 1e-4 is 0, and a sum of 70,000 ones is infinite.
        transformation, params = self._transformation(numbers), _as_float32(params)
        if not self.staleness:
            return transformation.update(_as_float32(grads), state, params)
        oldest, *later = *state.grads, grads
        oldest = _as_float32(oldest)
        changes, inner = transformation.update(oldest, state.state, params)
        return changes, Delayed(tuple(later), inner)

    def _transformation(self, numbers: Any) -> optax.GradientTransformation:
        matrices = None if self.decay_vectors else _matrices
        rate, decay = numbers["lr"], numbers["weight_decay"]
        momentum = numbers["momentum"] if self.has_momentum else None
        adam = {name: numbers[name] for name in ("b1", "b2", "eps")}
        layers: Any = {"weight_decay": decay, "adapted": matrices or _all}
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
                trust = {"trust_coefficient": numbers["trust_coefficient"]}
                parts.append(lars(rate, momentum=momentum, **trust, **layers))
            case "lamb":
                clip = numbers["trust_clip"]
                parts.append(lamb(rate, **adam, trust_clip=clip, **layers))
            case "rmsprop_warmup":
                share = numbers["sgd_share"]
                parts.append(rmsprop_warmup(rate, momentum=momentum, share=share))
            case name:
                parts.append(_found(name, self.args)(rate))
        return optax.chain(*parts)


def _as_float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


# Cached, because `optax_factory` tries the optimizer, which takes long.
_found = functools.lru_cache(maxsize=32)(optax_factory)


def _all(params: optax.Params) -> optax.Params:
    return jax.tree.map(lambda x: True, params)


def _matrices(params: optax.Params) -> optax.Params:
    """Marks matrices and convolutions, to be adapted and decayed; not vectors."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)
