"""Optimizers for large batches, as in their papers: LARS, LAMB and RMSProp warm-up.

Those of optax differ. Its LARS has the norm of a sum where the paper has a sum of
norms. Its LAMB also adapts vectors, and has no maximum of a norm. All expect gradients
and parameters in float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

__all__ = ["lamb", "lars", "rmsprop_warmup", "sgd_share"]

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
    rate: Any,
    *,
    b1: Any,
    b2: Any,
    eps: Any,
    weight_decay: Any,
    trust_clip: Any,
    adapted: Mask,
) -> optax.GradientTransformation:
    """Adam with a learning rate for each array: ``phi(|w|) / |u|`` of its step u."""

    return optax.chain(
        optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
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
