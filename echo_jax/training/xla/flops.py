"""Model FLOP utilisation: what an update computes, beside what the devices could.

The operations are XLA's own count over the program of one update, as traced: before
the compiler rewrites it. The count of the compiled program would miss what matters
most: on a GPU, matrix products become calls of a library, which XLA counts as nothing
(github.com/jax-ml/jax/issues/22249), and with several devices it is of one of them.
A group of updates has no program of its own here: the body of a scan is counted once,
however often it runs, so the program of a single update is what is counted, whatever
a dispatch holds.
"""

import re
import weakref
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import Mesh

from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.feeds.feed import Feed

__all__ = ["UpdateFlops", "count_flops", "peak_flops_per_s", "program_flops"]

# Dense matrix products in bfloat16, per device as jax counts devices, in TFLOP/s: the
# makers' data sheets, where a figure "with sparsity" is halved. The first name that a
# device's kind starts with, word by word, counts.
_PEAK_TFLOPS = {
    # nvidia.com/en-us/data-center/h200, h100, a100, l4; GH200 holds an H100.
    "NVIDIA H200": 989.4,
    "NVIDIA GH200": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H100": 989.4,
    "NVIDIA A100": 312.0,
    "NVIDIA L4": 121.0,
    # cloud.google.com/tpu/docs/v4, v5e, v5p, v6e.
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5": 459.0,
    "TPU v5p": 459.0,
    "TPU v6 lite": 918.0,
    "TPU v6e": 918.0,
}


@dataclass(frozen=True)
class UpdateFlops:
    """What an update computes, over all devices.

    Attributes:
      per_update: Floating-point operations, a multiplication and an addition being two;
        None where XLA does not say.
      peak_per_s: See `peak_flops_per_s`.

    Example:
      >>> UpdateFlops(2e6, 1e9).rates(updates=100, seconds=0.5)
      {'flops_per_update': 2000000.0, 'flops_per_s': 400000000.0, 'mfu': 0.4}
    """

    per_update: float | None
    peak_per_s: float | None

    def rates(self, *, updates: int, seconds: float) -> dict[str, float]:
        """Returns what is known of updates that took so long, waiting included.

        Args:
          updates: How many.
          seconds: In which time.

        Returns:
          ``flops_per_update``, ``flops_per_s``, and ``mfu``, their part of the peak.
        """
        if self.per_update is None:
            return {}
        per_s = self.per_update * updates / seconds
        found = {"flops_per_update": self.per_update, "flops_per_s": per_s}
        return found | ({"mfu": per_s / self.peak_per_s} if self.peak_per_s else {})


def count_flops(compiled: CompiledFunctions, state: Any, feed: Feed) -> UpdateFlops:
    """Counts the floating-point operations of one update; compiles nothing.

    Args:
      compiled: The run's functions.
      state: Not changed; only its shapes count.
      feed: From which nothing is taken.
    """
    traced = compiled.trace(state, feed)
    # The runs of a search share their program, and jax keeps one jaxpr for it.
    if traced.jaxpr not in _counted:
        _counted[traced.jaxpr] = program_flops(traced.lower())
    return UpdateFlops(_counted[traced.jaxpr], peak_flops_per_s(compiled.mesh))


_counted: weakref.WeakKeyDictionary[Any, float | None] = weakref.WeakKeyDictionary()


def program_flops(lowered: Any) -> float | None:
    """Returns the floating-point operations of a program, over all its devices.

    ``Lowered.cost_analysis`` returns None for GPUs and TPUs, because it asks the client
    of the devices, and those of plugins do not count. The program is the same whoever
    counts, so the client of the CPU does.

    Args:
      lowered: From ``jax.jit(...).lower(...)``.

    Returns:
      The count; None where it is 0, or where JAX_PLATFORMS leaves no CPU.

    Example:
      >>> x = jnp.ones((2, 3))
      >>> program_flops(jax.jit(lambda x: x @ x.T).lower(x))
      24.0
    """
    try:
        host = jax.local_devices(backend="cpu")[0].client
    except RuntimeError:
        return None
    module = lowered.compiler_ir("hlo").as_hlo_module()
    return _jax.hlo_module_cost_analysis(host, module).get("flops") or None


def peak_flops_per_s(mesh: Mesh) -> float | None:
    """Returns what the devices of a run could compute, in operations per second.

    It is the peak in bfloat16, whatever a model computes in: a run in float32 shows
    what it leaves unused.

    Args:
      mesh: The devices.

    Returns:
      The sum; None if a device is not known, such as a CPU or a part of a GPU.

    Example:
      >>> peak_flops_per_s(make_mesh(1, 1, batch_size=32)) is None  # on a CPU
      True
    """
    peaks = [_peak_tflops(device.device_kind) for device in mesh.devices.flat]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) * 1e12 if len(known) == len(peaks) else None


def _peak_tflops(kind: str) -> float | None:
    if " MIG " in kind:
        return None
    for name, peak in _PEAK_TFLOPS.items():
        if re.match(rf"{name}\b", kind):
            return peak
    return None
