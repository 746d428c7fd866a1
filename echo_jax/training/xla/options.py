"""Options of XLA for the compiled update alone: what is fused, and what overlaps.

In ``XLA_FLAGS`` an unknown option ends the process; here it is an error with its name.
"""

from typing import Any

import jax

from echo_jax.config import Config
from echo_jax.config.optimizer import parse_args

XlaOptions = tuple[tuple[str, bool | int | float | str], ...]
"""Names and values, hashable: programs are shared by runs with equal options."""

# The bytes that are summed together, and whether the scheduler hides the latency of
# sums. `fuse` has as few all-reduces as possible. `overlap` has some of 4 MiB beside
# other work. `serial` has one for each array, beside nothing, to compare with.
_PRESETS: dict[str, tuple[int, bool | None]] = {
    "fuse": (2**31 - 1, None),
    "overlap": (4 * 2**20, True),
    "serial": (0, False),
}
_NAMES = {
    "gpu": (
        "xla_gpu_all_reduce_combine_threshold_bytes",
        "xla_gpu_enable_latency_hiding_scheduler",
    ),
    "tpu": (
        "xla_jf_crs_combiner_threshold_in_bytes",
        "xla_tpu_enable_latency_hiding_scheduler",
    ),
}
# Only a TPU v5e was seen to run all-reduces beside matrix products with these.
_OVERLAP_ON_V5E = (
    "xla_enable_async_all_reduce",
    "xla_tpu_enable_async_collective_fusion",
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
)


def xla_options(config: Config, platform: str, kind: str = "") -> XlaOptions:
    """Returns the options of a config and of its preset, tried if XLA is here."""
    preset, options = config.xla.preset, dict[str, Any]()
    if platform in _NAMES and preset in _PRESETS:
        values = zip(_NAMES[platform], _PRESETS[preset], strict=True)
        options |= {name: value for name, value in values if value is not None}
    if kind == "TPU v5 lite" and preset == "overlap":
        options |= dict.fromkeys(_OVERLAP_ON_V5E, True)
    options |= parse_args(config.xla.options, "xla.options")
    try:
        if options and platform == jax.default_backend():
            jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"config.xla.options={config.xla.options!r} with config.xla.preset="
            f"{config.xla.preset!r} cannot compile for {platform} with jax "
            f"{jax.__version__} ({reason}); leave out what it does not know"
        ) from error
    return tuple(sorted(options.items()))
