"""Optimizers and learning rates: a compiled structure, and numbers that are inputs.

A study tries a thousand learning rates, and compiling takes minutes. So an `Optimizer`
decides the structure of the program; it is hashable and compiled in. The numbers are
arrays that the compiled step takes as inputs: the learning rate and its schedule,
momentum or b1 and b2, weight decay, and the norm to clip at. Runs that differ only in
these numbers share one compilation. A zero may change the structure: without momentum,
no buffer is needed for it.

Those for large batches are as in their papers, where optax differs: its LARS has the
norm of a sum for a sum of norms, and its LAMB also adapts vectors and has no maximum of
a norm. They expect gradients and parameters in float32.

Every schedule gives a fraction of the peak, which ``optim.lr`` and ``optim.scale`` set;
docs/large-batches.md lists them. No update has a learning rate of 0. One update has the
peak, and one the end: the last update of the warm-up is the first at the peak. After
the last update of ``onecycle`` one more would have its end, as in optax.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from echo_jax.config.optim import OWN_OPTIMIZERS, SLOW_START_ENDS
from echo_jax.config.optimizer import optax_factory, optax_schedule
from echo_jax.config.run import RunSpec
from echo_jax.config.specs import BatchSpec

Mask = Callable[[Any], Any]
"""Gives for parameters a tree of which are matrices: adapted, and decayed."""

# The constants of RMSProp's part come from third-party ports; the paper has none.
_RMS_DECAY, _RMS_RATE, _RMS_EPS = 0.99, 3e-4, 1e-8


# With eta for `trust_coefficient` and beta for `weight_decay`, the rate of an array is
# multiplied by eta |w| / (|g| + beta |w|) (You, Gitman and Ginsburg 2017, equation 6),
# and by 1 if a norm is 0. The momentum buffer sums gradients without the learning rate.
# At a constant rate this is the paper's algorithm 1. If the rate changes, it has the
# correction of Goyal et al. 2017, section 2.1. Arrays that are not adapted are trained
# by plain SGD.
def lars(
    rate: Any,
    *,
    momentum: Any,
    weight_decay: Any,
    trust_coefficient: Any,
    adapted: Mask,
) -> optax.GradientTransformation:
    """SGD whose learning rate is adapted to the norms of each array."""

    def ratio(param: jax.Array, grad: jax.Array) -> jax.Array:
        return trust_coefficient * param / (grad + weight_decay * param)

    adapt = _adapt(ratio, adapted, decay=weight_decay)
    return optax.chain(adapt, optax.sgd(rate, momentum))


def _adapt(
    ratio: Callable[[jax.Array, jax.Array], jax.Array], adapted: Mask, decay: Any = None
) -> optax.GradientTransformation:
    """Multiplies each decayed array by a ratio of the parameter's norm and its own."""

    def of_array(step: jax.Array, param: jax.Array, is_adapted: bool) -> jax.Array:
        if not is_adapted:
            return step
        norms = jnp.linalg.norm(param), jnp.linalg.norm(step)
        factor = jnp.where((norms[0] > 0) & (norms[1] > 0), ratio(*norms), 1.0)
        return factor * (step if decay is None else step + decay * param)

    return optax.stateless(
        lambda steps, params: jax.tree.map(of_array, steps, params, adapted(params))
    )


# u is Adam's step plus the decayed array, and phi has the maximum `trust_clip` (You et
# al. 2020, algorithm 2). The factor is 1 if a norm is 0. Arrays that are not adapted
# are trained by Adam.
def lamb(
    rate: Any, *, weight_decay: Any, trust_clip: Any, adapted: Mask, **adam: Any
) -> optax.GradientTransformation:
    """Adam with a learning rate for each array: ``phi(|w|) / |u|`` of its step u."""

    return optax.chain(
        optax.scale_by_adam(**adam),
        optax.add_decayed_weights(weight_decay, adapted),
        _adapt(lambda param, step: jnp.minimum(param, trust_clip) / step, adapted),
        optax.scale_by_learning_rate(rate),
    )


# The gradient is multiplied by a + b / (sqrt(m) + 1e-8). Here m is the mean of its
# squares, a is the share of SGD, and b = (1 - a) 3e-4 / rate (Akiba, Suzuki and Fukuda
# 2017, section 3).
def rmsprop_warmup(
    rate: Any, *, momentum: Any, share: Any
) -> optax.GradientTransformation:
    """RMSProp at first, momentum SGD later, and a mixture in between."""

    def init(params: optax.Params) -> optax.OptState:
        return jax.tree.map(jnp.zeros_like, params)

    def update(
        updates: optax.Updates, state: optax.OptState, params: Any = None
    ) -> tuple[optax.Updates, optax.OptState]:
        squares = jax.tree.map(
            lambda mean, grad: _RMS_DECAY * mean + (1 - _RMS_DECAY) * grad**2,
            state,
            updates,
        )
        rms_share = (1 - share) * _RMS_RATE / rate
        mixed = jax.tree.map(
            lambda grad, mean: (share + rms_share / (jnp.sqrt(mean) + _RMS_EPS)) * grad,
            updates,
            squares,
        )
        return mixed, squares

    mixture = optax.GradientTransformation(init, update)
    return optax.chain(mixture, optax.sgd(rate, momentum))


# It grows exponentially to a half at `transition_updates` (the paper: 10 epochs). Then
# it grows in a line, and is 1 after 1.25 times as long. The constants come from
# third-party ports. Only the slope of 1/5 per epoch continues the exponential smoothly.
def sgd_share(update: Any, transition_updates: Any) -> jax.Array:
    """Returns the share of SGD in `rmsprop_warmup`, ``float32[]``."""
    beyond = update / transition_updates - 1
    rising = 0.5 * jnp.exp(4 * jnp.minimum(beyond, 0))
    return jnp.where(beyond < 0, rising, jnp.minimum(0.5 + 2 * beyond, 1.0))


Numbers = dict[str, jax.Array]
"""By name, ``float32[]`` or ``int32[]``; ``boundaries`` is ``int32[N]`` and
``fractions`` is ``float32[M]``."""


def schedule_numbers(config: RunSpec) -> dict[str, Any]:
    """Returns the numbers of a config that `learning_rate` needs, by name."""
    optim = config.optim
    length = optim.decay_updates or config.updates
    ratio = config.batch_size / optim.reference_batch
    scaling = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}
    boundaries = tuple(optim.boundaries)
    if optim.schedule == "slow_start" and not boundaries:
        boundaries = tuple(round(part * length) for part in SLOW_START_ENDS)
    names = ("start_fraction", "end_fraction", "boundary_scale", "peak_at")
    names += ("warmup_updates", "cycle_updates", "cooldown_updates", "fractions")
    return {
        **{name: optim[name] for name in names},
        "lr": optim.lr * scaling[optim.scale],
        "decay_updates": length,
        "boundaries": boundaries,
    }


def learning_rate(
    schedule: str, numbers: Numbers, update: jax.Array | int, *, args: str = "{}"
) -> jax.Array:
    """Returns the learning rate of an update, counted from 0, ``float32[]``.

    Example:
      A linear schedule with lr 1, 2 warm-up updates of 6, and end fraction 0.2
      trains its updates with 0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2, ...
    """
    warmup, total = numbers["warmup_updates"], numbers["decay_updates"]
    start, end = numbers["start_fraction"], numbers["end_fraction"]
    last_warm = jnp.maximum(warmup - 1, 0)
    left = jnp.maximum(total - 1 - last_warm, 1)
    passed = (update >= numbers["boundaries"]).sum()
    now = jnp.float32(update)

    def done(after: jax.Array, updates: jax.Array) -> jax.Array:
        return jnp.clip((update - after) / updates, 0.0, 1.0)

    match schedule:
        case "constant":
            scale = jnp.ones(())
        case "linear":
            scale = (1 - end) * (1 - done(last_warm, left)) + end
        case "cosine":
            falling = 0.5 * (1 + jnp.cos(jnp.pi * done(last_warm, left)))
            scale = (1 - end) * falling + end
        case "piecewise":
            scale = jax.lax.pow(jnp.float32(numbers["boundary_scale"]), passed)
        case "slow_start":
            scale = numbers["fractions"][passed]
        case "warmup_stable_decay":
            cooldown = numbers["cooldown_updates"]
            scale = 1 - (1 - end) * done(total - 1 - cooldown, cooldown)
        case "cyclic":
            half = numbers["cycle_updates"] / 2
            scale = start + (1 - start) * (1 - jnp.abs(now / half % 2 - 1))
        case "onecycle":
            is_rising = now < numbers["peak_at"] * jnp.float32(total)
            lowest = jnp.where(is_rising, start, end)
            scale = lowest + (1 - lowest) * share_of_rise(numbers, update)
        case name:
            with jax.numpy_dtype_promotion("standard"):  # Optax needs it.
                scale = optax_schedule(name, args)(update)
    rising = jnp.where(
        start > 0,
        start + (1 - start) * now / jnp.float32(jnp.maximum(last_warm, 1)),
        (update + 1) / jnp.maximum(warmup, 1),
    )
    scale = jnp.where(update < last_warm, rising, scale)
    return (numbers["lr"] * scale).astype(jnp.float32)


def share_of_rise(numbers: Numbers, update: jax.Array | int) -> jax.Array:
    """Returns how near to its peak ``onecycle`` is: 0 at both ends, 1 at the peak."""
    now, total = jnp.float32(update), jnp.float32(numbers["decay_updates"])
    peak = numbers["peak_at"] * total
    down = (now - peak) / (total - peak)
    from_peak = jnp.where(now < peak, 1 - now / peak, jnp.clip(down, 0.0, 1.0))
    return 0.5 * (1 + jnp.cos(jnp.pi * from_peak))


_FLOATS = ("lr", "start_fraction", "end_fraction", "boundary_scale", "peak_at")
_FLOATS += ("momentum", "peak_momentum", "b1", "b2", "eps", "weight_decay", "clip_norm")
_FLOATS += ("trust_coefficient", "trust_clip")
_INTEGERS = ("warmup_updates", "decay_updates", "cycle_updates", "cooldown_updates")
_INTEGERS += ("transition_updates",)
_CONSTANT = BatchSpec()
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


def hyperparams(config: RunSpec) -> Hyperparams:
    """Returns the numbers of a config that are inputs of the compiled step."""
    optim = config.optim
    scaled = {name: optim[name] for name in ("b1", "b2", "eps")}
    # In larger batches, the means of Adam and LAMB forget faster, and their eps is
    # smaller (Malladi et al. 2022, section 5).
    if optim.scale == "sqrt":
        ratio = config.batch_size / optim.reference_batch
        scaled |= {name: 1 - ratio * (1 - scaled[name]) for name in ("b1", "b2")}
        scaled["eps"] /= math.sqrt(ratio)
    numbers = {**optim.to_dict(), **schedule_numbers(config), **scaled}

    def array(values: Iterable[float], dtype: Any) -> jax.Array:
        return jnp.asarray(np.array([*values], dtype))  # Compiles no conversion.

    return Hyperparams(
        array((numbers[name] for name in _FLOATS), np.float32),
        array((numbers[name] for name in _INTEGERS), np.int32),
        array(numbers["boundaries"], np.int32),
        array(numbers["fractions"], np.float32),
    )


class Delayed(NamedTuple):
    """The state of an optimizer, and the gradients that wait, oldest first."""

    grads: tuple[Any, ...]
    state: Any


@dataclass(frozen=True)
class Optimizer:
    """The compiled part of an optimizer: all but its numbers; hashable."""

    name: str
    args: str  # JSON arguments of an optax optimizer; they may change the structure.
    schedule: str
    schedule_args: str
    nesterov: bool
    # Whether biases, norm scales and other vectors are decayed too.
    decay_vectors: bool
    has_momentum: bool
    has_decay: bool  # Whether SGD adds decayed parameters to the gradient (L2).
    clips: bool
    growth: BatchSpec  # The growth of the batch that the learning rate follows.
    # How many updates after its own a gradient is applied, as in asynchronous SGD.
    staleness: int

    @classmethod
    def from_config(cls, config: RunSpec) -> "Optimizer":
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
            growth=config.batch if optim.scale == "linear" else _CONSTANT,
            staleness=config.local.staleness,
        )

    def init(self, params: Any) -> Any:
        """Returns the state before the first update: a pytree of float32 arrays."""
        # The first state does not depend on these numbers, so any will do.
        numbers = dict.fromkeys((*_FLOATS, "sgd_share"), 0.5)
        state = self._transformation(numbers).init(_in_float32(params))
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
        inner = state.state if self.staleness else state
        oldest, *later = (*state.grads, grads) if self.staleness else (grads,)
        given = _in_float32(oldest), inner, _in_float32(params)
        with jax.numpy_dtype_promotion("standard"):  # Optax's Adam, among others.
            changes, inner = self._transformation(numbers).update(*given)
        return changes, Delayed(tuple(later), inner) if self.staleness else inner

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


_in_float32 = functools.partial(optax.tree.cast, dtype=jnp.float32)

# Cached, because `optax_factory` tries the optimizer, which takes long.
_found = functools.lru_cache(maxsize=32)(optax_factory)


def _all(params: optax.Params) -> optax.Params:
    return jax.tree.map(lambda x: True, params)


def _matrices(params: optax.Params) -> optax.Params:
    """Marks matrices and convolutions, to be adapted and decayed; not vectors."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)
