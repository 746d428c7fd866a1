"""Optimizers and learning rates: a compiled structure, and numbers that are inputs.

A study tries a thousand learning rates, and compiling takes minutes. So an `Optimizer`
decides the structure of the program; it is hashable and compiled in. The numbers are
arrays that the compiled step takes as inputs. Those that change during a run are one
array over its updates, made on the host. Runs that differ only in numbers share one
compilation. A zero may change the structure: without momentum, no buffer is needed.

Those for large batches are as in their papers, where optax differs: its LARS has the
norm of a sum for a sum of norms, and its LAMB also adapts vectors and has no maximum of
a norm. They expect gradients and parameters in float32.

Every schedule gives a fraction of the peak, which ``optim.lr`` and ``optim.scale`` set;
docs/large-batches.md lists them. No update has a learning rate of 0. One update has the
peak, and one the end: the last update of the warm-up is the first at the peak. After
the last update of ``onecycle`` one more would have its end, as in optax.
"""

import collections
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from echo_jax.config.optim import OWN_OPTIMIZERS, SLOW_START_ENDS
from echo_jax.config.optimizer import optax_factory, optax_schedule
from echo_jax.config.run import RunSpec

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
    rate: Any, momentum: Any, share: Any
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


Numbers = dict[str, Any]
"""By name ``float32[]``; ``float32[N]`` for one that changes from update to update."""

# The numbers that an optimizer reads, besides its learning rate.
_NUMBERS = {
    "adamw": ("b1", "b2", "eps", "weight_decay"),
    "sgd": ("momentum", "weight_decay"),
    "lars": ("momentum", "weight_decay", "trust_coefficient"),
    "lamb": ("b1", "b2", "eps", "weight_decay", "trust_clip"),
    "rmsprop_warmup": ("momentum", "weight_decay"),
}


def numbers_of(config: RunSpec) -> Numbers:
    """Returns the numbers of a config that are inputs of the compiled step."""
    optim, ratio = config.optim, config.batch_size / config.optim.reference_batch
    names = (*_NUMBERS.get(optim.name, ()), *["clip_norm"] * (optim.clip_norm > 0))
    numbers: Numbers = {name: optim[name] for name in names}
    # In larger batches, the means of Adam and LAMB forget faster, and their eps is
    # smaller (Malladi et al. 2022, section 5).
    if optim.scale == "sqrt":
        for name in numbers.keys() & {"b1", "b2"}:
            numbers[name] = 1 - ratio * (1 - numbers[name])
        if "eps" in numbers:
            numbers["eps"] /= math.sqrt(ratio)
    numbers = {name: np.float32(number) for name, number in numbers.items()}
    update = _updates(config)
    # Momentum, or b1, falls to its peak value as the rate rises, and then rises.
    if optim.schedule == "onecycle":
        for name in numbers.keys() & {"momentum", "b1"}:
            low = np.minimum(np.float32(optim.peak_momentum), numbers[name])
            rise = _share_of_rise(config, update)
            numbers[name] = numbers[name] - (numbers[name] - low) * rise
    if optim.name == "rmsprop_warmup":
        numbers["sgd_share"] = sgd_share(update, optim.transition_updates)
    return {"lr": learning_rates(config, update), **numbers}


def numbers_at(numbers: Numbers, update: jax.Array | int) -> dict[str, jax.Array]:
    """Returns the numbers of an update, each ``float32[]``; the last ones after all."""
    return {
        name: jax.lax.dynamic_index_in_dim(each, update, keepdims=False)
        if jnp.ndim(each)
        else each
        for name, each in numbers.items()
    }


# Runs of up to so many updates have arrays of one length, and so share a program.
_SHORTEST, _LONGEST = 2**10, 2**20


def _updates(config: RunSpec) -> np.ndarray:
    """Returns the updates whose numbers are kept, counted from 0, ``float32[N]``."""
    optim, count = config.optim, config.updates
    # A constant rate changes no more after these, so that a run may be without end.
    if optim.schedule == "constant":
        last = (optim.warmup_updates, 2 * optim.transition_updates)
        count = min(count, max(_LONGEST, *last, *config.batch.boundaries) + 1)
    length = 1 << (max(count, _SHORTEST) - 1).bit_length()
    return np.arange(length, dtype=np.float32)


def learning_rates(config: RunSpec, update: np.ndarray) -> np.ndarray:
    """Returns the learning rates of updates, counted from 0, ``float32[N]``.

    Example:
      A linear schedule with lr 1, 2 warm-up updates of 6, and end fraction 0.2
      trains its updates with 0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2, ...
    """
    optim = config.optim
    warmup, total = optim.warmup_updates, optim.decay_updates or config.updates
    start, end = np.float32(optim.start_fraction), np.float32(optim.end_fraction)
    last_warm = max(warmup - 1, 0)
    left = max(total - 1 - last_warm, 1)

    def done(after: int, updates: int) -> np.ndarray:
        return np.clip((update - after) / updates, 0.0, 1.0)

    match optim.schedule:
        case "constant":
            scale = np.ones_like(update)
        case "linear":
            scale = (1 - end) * (1 - done(last_warm, left)) + end
        case "cosine":
            falling = 0.5 * (1 + np.cos(np.pi * done(last_warm, left)))
            scale = (1 - end) * falling + end
        case "piecewise":
            drops = np.searchsorted(optim.boundaries, update, side="right")
            scale = optim.boundary_scale**drops
        case "slow_start":
            ends = [round(part * total) for part in SLOW_START_ENDS]
            changes = np.searchsorted(optim.boundaries or ends, update, side="right")
            scale = np.array(optim.fractions)[changes]
        case "warmup_stable_decay":
            cooldown = optim.cooldown_updates
            scale = 1 - (1 - end) * done(total - 1 - cooldown, cooldown)
        case "cyclic":
            half = optim.cycle_updates / 2
            scale = start + (1 - start) * (1 - np.abs(update / half % 2 - 1))
        case "onecycle":
            lowest = np.where(update < np.float32(optim.peak_at) * total, start, end)
            scale = lowest + (1 - lowest) * _share_of_rise(config, update)
        case name:
            schedule = jax.vmap(optax_schedule(name, optim.schedule_args))
            with jax.numpy_dtype_promotion("standard"):  # Optax needs it.
                scale = jax.device_get(schedule(update.astype(np.int32)))
    rising = (update + 1) / max(warmup, 1)
    if start > 0:
        rising = start + (1 - start) * update / max(last_warm, 1)
    scale = np.where(update < last_warm, rising, scale.astype(np.float32))
    ratio = config.batch_size / optim.reference_batch
    scaling = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[optim.scale]
    rates = np.float32(optim.lr * scaling) * scale
    if optim.scale == "linear":  # The rate follows the growth of the batch.
        for boundary, factor in config.batch.steps():
            rates = rates / np.where(update < boundary, np.float32(factor), 1)
    return rates


def _share_of_rise(config: RunSpec, update: np.ndarray) -> np.ndarray:
    """Returns how near to its peak ``onecycle`` is: 0 at both ends, 1 at the peak."""
    total = np.float32(config.optim.decay_updates or config.updates)
    peak = np.float32(config.optim.peak_at) * total
    down = np.clip((update - peak) / (total - peak), 0.0, 1.0)
    from_peak = np.where(update < peak, 1 - update / peak, down)
    return 0.5 * (1 + np.cos(np.pi * from_peak))


# It grows exponentially to a half at `transition_updates` (the paper: 10 epochs). Then
# it grows in a line, and is 1 after 1.25 times as long. The constants come from
# third-party ports. Only the slope of 1/5 per epoch continues the exponential smoothly.
def sgd_share(update: np.ndarray, transition_updates: int) -> np.ndarray:
    """Returns the share of SGD in `rmsprop_warmup` at updates, ``float32[N]``."""
    beyond = update / transition_updates - 1
    rising = 0.5 * np.exp(4 * np.minimum(beyond, 0))
    return np.where(beyond < 0, rising, np.minimum(0.5 + 2 * beyond, 1.0))


class Delayed(NamedTuple):
    """The state of an optimizer, and the gradients that wait, oldest first."""

    grads: tuple[Any, ...]
    state: Any


@dataclass(frozen=True)
class Optimizer:
    """The compiled part of an optimizer: all but its numbers; hashable."""

    name: str
    args: str  # JSON arguments of an optax optimizer; they may change the structure.
    nesterov: bool
    # Whether biases, norm scales and other vectors are decayed too.
    decay_vectors: bool
    has_momentum: bool
    has_decay: bool  # Whether SGD adds decayed parameters to the gradient (L2).
    clips: bool
    # How many updates after its own a gradient is applied, as in asynchronous SGD.
    staleness: int

    @classmethod
    def from_config(cls, config: RunSpec) -> "Optimizer":
        optim = config.optim
        name, is_own = optim.name, optim.name in OWN_OPTIMIZERS
        has_momentum = "momentum" in _NUMBERS.get(name, ()) and optim.momentum > 0
        # Unused fields have one fixed value, so that they cost no compilation.
        return cls(
            name=name,
            args="{}" if is_own else optim.args,
            nesterov=name == "sgd" and has_momentum and optim.nesterov,
            decay_vectors=is_own and optim.decay_vectors,
            has_momentum=has_momentum,
            has_decay=name in ("sgd", "rmsprop_warmup") and optim.weight_decay > 0,
            clips=optim.clip_norm > 0,
            staleness=config.local.staleness,
        )

    def init(self, params: Any) -> Any:
        """Returns the state before the first update: a pytree of float32 arrays."""
        # The first state does not depend on these numbers, so any will do.
        numbers = collections.defaultdict(lambda: 0.5)
        state = self._transformation(numbers).init(_in_float32(params))
        if not self.staleness:
            return state
        # The first updates apply gradients of 0.
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Delayed((zeros,) * self.staleness, state)

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
        rate, adapted = numbers["lr"], matrices or _all
        own: Any = {name: numbers[name] for name in _NUMBERS.get(self.name, ())}
        if not self.has_momentum and "momentum" in own:
            own["momentum"] = None
        parts = []
        if self.clips:
            parts.append(optax.clip_by_global_norm(numbers["clip_norm"]))
        if self.has_decay:
            parts.append(optax.add_decayed_weights(own["weight_decay"], matrices))
        match self.name:
            case "adamw":
                parts.append(optax.adamw(rate, **own, mask=matrices))
            case "sgd":
                parts.append(optax.sgd(rate, own["momentum"], nesterov=self.nesterov))
            case "lars":
                parts.append(lars(rate, **own, adapted=adapted))
            case "lamb":
                parts.append(lamb(rate, **own, adapted=adapted))
            case "rmsprop_warmup":
                share = numbers["sgd_share"]
                parts.append(rmsprop_warmup(rate, own["momentum"], share))
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
