"""Options of XLA for the compiled update alone: what is fused, and what overlaps.

As options of one program they touch nothing else, and one that XLA does not know is an
error with its name; in ``XLA_FLAGS`` it ends the process.
"""

from typing import Any

import jax

from echo_jax.config import Config
from echo_jax.config.optimizer import parse_args

__all__ = ["XlaOptions", "xla_options"]

XlaOptions = tuple[tuple[str, bool | int | float | str], ...]
"""Names and values, hashable: a part of what decides whether programs are shared."""

_ALL, _SOME, _NONE = 2**31 - 1, 4 * 2**20, 0  # bytes that are reduced together
_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "gpu": {
        "fuse": {"xla_gpu_all_reduce_combine_threshold_bytes": _ALL},
        "overlap": {
            "xla_gpu_all_reduce_combine_threshold_bytes": _SOME,
            "xla_gpu_enable_latency_hiding_scheduler": True,
        },
        "serial": {
            "xla_gpu_all_reduce_combine_threshold_bytes": _NONE,
            "xla_gpu_enable_latency_hiding_scheduler": False,
        },
    },
    "tpu": {
        "fuse": {"xla_jf_crs_combiner_threshold_in_bytes": _ALL},
        "overlap": {
            "xla_jf_crs_combiner_threshold_in_bytes": _SOME,
            "xla_tpu_enable_latency_hiding_scheduler": True,
        },
        "serial": {
            "xla_jf_crs_combiner_threshold_in_bytes": _NONE,
            "xla_tpu_enable_latency_hiding_scheduler": False,
        },
    },
}
# Beside those of the platform, of one kind of its devices.
_OF_KIND: dict[str, dict[str, dict[str, Any]]] = {
    "TPU v5 lite": {
        "overlap": {
            "xla_enable_async_all_reduce": True,
            "xla_tpu_enable_async_collective_fusion": True,
            "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
        }
    }
}


def xla_options(config: Config, platform: str, kind: str = "") -> XlaOptions:
    """Returns the options of a config, those of its preset among them.

    The presets say how gradients are summed over the devices: ``fuse`` in as few
    all-reduces as can be, ``overlap`` in some of 4 MiB, while others are computed,
    ``serial`` one by one and beside nothing, to compare with. On CPUs they have no
    options. On a TPU v5e ``overlap`` has all-reduces run beside matrix products, which
    other TPUs were not seen to take.

    Args:
      config: A checked training config.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``. Options are tried where it is that
        of this machine.
      kind: Of its devices, as jax says it, such as ``"TPU v5 lite"``.

    Raises:
      ValueError: XLA does not know an option, or not with this value.

    Example:
      >>> config = default_config()
      >>> config.xla.preset = "fuse"
      >>> xla_options(config, "cpu")
      ()
    """
    preset: dict[str, Any] = {}
    for presets in (_PRESETS.get(platform, {}), _OF_KIND.get(kind, {})):
        preset |= presets.get(config.xla.preset, {})
    options = {**preset, **parse_args(config.xla.options, "xla.options")}
    if options:
        _try(config, platform, options)
    return tuple(sorted(options.items()))


def _try(config: Config, platform: str, options: dict[str, Any]) -> None:
    if platform != jax.default_backend():
        return
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"config.xla.options={config.xla.options!r} with config.xla.preset="
            f"{config.xla.preset!r} cannot compile for {platform} with jax "
            f"{jax.__version__} ({reason}); leave out what it does not know"
        ) from error
