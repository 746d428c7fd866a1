"""The parts of an update: its gradient, its optimizer, and its precision."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "gradients": ["SplitGradient", "whole_gradient"],
        "local": ["sync_updates"],
        "loss_scale": ["LossScale", "adjust", "scale_numbers"],
        "noise": ["gradient_noise_scale"],
        "optim": ["Optimizer", "numbers_at", "numbers_of"],
    },
)
