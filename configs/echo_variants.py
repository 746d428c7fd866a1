"""Variants that every workload's config has: where the echo is, and in what order.

    configs/cifar.py:spread            echo factor 2, of decoded images, spread
    configs/cifar.py:tiny,after        the same small run, echoed after augmentation

Names are joined by commas and applied from left to right. They set the echo alone
(a factor of 2, where the paper compares placements: Choi et al. 2019, figure 3), and
leave its buffer as the config has it:

    baseline     every example once
    read         raw records are reused: decoded and augmented anew at every use
    before       decoded examples are reused, before augmentation
    after        augmented examples are reused
    batch        whole batches are reused, back to back
    consecutive  uses of an example back to back
    shuffle      repeated, and shuffled within a delay that the buffer bounds
    shuffle_buffer  repeated, then through the paper's own shuffle buffer, of uses
    spread       uses of an example evenly far apart
    device       decoded examples are reused in accelerator memory, spread

A placement of examples brings ``shuffle`` along; an order that is named after it
takes its place, and keeps the placement: ``after,spread``.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

_FACTOR = 2.0

ECHO_VARIANTS: dict[str, dict[str, Any]] = {
    "baseline": {"factor": 1.0, "order": "consecutive"},
    "read": {"factor": _FACTOR, "stage": "read", "order": "window_shuffle"},
    "before": {"factor": _FACTOR, "stage": "decode", "order": "window_shuffle"},
    "after": {"factor": _FACTOR, "stage": "augment", "order": "window_shuffle"},
    # A buffer of batches is none of examples, and back to back needs none.
    "batch": {"factor": _FACTOR, "stage": "batch", "order": "consecutive", "buffer": 1},
    "consecutive": {"factor": _FACTOR, "order": "consecutive"},
    "shuffle": {"factor": _FACTOR, "order": "window_shuffle"},
    "shuffle_buffer": {"factor": _FACTOR, "order": "shuffle_buffer"},
    "spread": {"factor": _FACTOR, "order": "spread"},
    "device": {
        "factor": _FACTOR,
        "stage": "decode",
        "order": "spread",
        "buffer_on": "device",
    },
}
"""What each variant sets of ``config.echo``."""


def apply_variant(config: ConfigDict, name: str) -> None:
    """Sets the echo of a config.

    Args:
      config: A training config; changed.
      name: One of `ECHO_VARIANTS`.

    Raises:
      KeyError: There is no such variant.

    Example:
      >>> apply_variant(config, "after")
      >>> config.echo.stage, config.echo.order, config.echo.factor
      ('augment', 'window_shuffle', 2.0)
    """
    config.echo.update(ECHO_VARIANTS[name])


def apply_variants(
    config: ConfigDict, variant: str, own: Mapping[str, Callable[[ConfigDict], None]]
) -> None:
    """Applies variants joined by commas, from left to right.

    Args:
      config: A training config; changed.
      variant: Names of `own` and of `ECHO_VARIANTS`, such as ``"tiny,spread"``; ``""``
        changes nothing.
      own: What the config's own variants do, by name.

    Raises:
      ValueError: A name is unknown.

    Example:
      >>> apply_variants(config, "tiny,spread", {"tiny": _make_tiny})
    """
    for name in filter(None, variant.split(",")):
        if name in own:
            own[name](config)
        elif name in ECHO_VARIANTS:
            apply_variant(config, name)
        else:
            known = ", ".join({**own, **ECHO_VARIANTS})
            raise ValueError(
                f"variant {name!r} is unknown; use {known}, several joined by commas, "
                "or none."
            )
