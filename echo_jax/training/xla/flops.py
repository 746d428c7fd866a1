"""The operations of an update beside the devices' peak, and the bytes that it sends.

XLA counts the operations of one update's program before it is compiled. Once compiled,
a GPU's matrix products are calls of a library, which XLA counts as nothing
(github.com/jax-ml/jax/issues/22249), and the program is that of a single device. XLA
counts the body of a scan once, so a group of updates is not counted as one program.
"""

import math
import re
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import Mesh

from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.feeds.feed import Feed

# "%name = type opcode(operands), attributes". The type of the end of a collective, of
# one that has a start and an end, is that of its result alone.
_COLLECTIVE = re.compile(
    r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute|ragged-all-to-all"
    r"|reduce-scatter)(?:-done)?\((.*)"
)
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
# On TPUs an all-reduce that runs beside other operations is printed in pieces.
_PIECE = re.compile(r'channel_id=(\d+).*chain_id="(\d+)"')


def collectives(text: str) -> list[tuple[str, Counter[str]]]:
    """Returns each collective's kind, and its result's elements by type."""
    found: list[tuple[str, Counter[str]]] = []
    pieces: set[tuple[str, ...]] = set()
    for shape, kind, rest in _COLLECTIVE.findall(re.sub(r"/\*.*?\*/", "", text)):
        if piece := _PIECE.search(rest):
            if piece.groups() in pieces:
                continue
            pieces.add(piece.groups())
        elements: Counter[str] = Counter()
        for dtype, dims in _ARRAY.findall(shape):
            elements[dtype] += math.prod(int(each) for each in dims.split(",") if each)
        found.append((kind, elements))
    return found


def sent_bytes(program: Any) -> int:
    """Returns the bytes that a program's collectives give to each device."""
    # For an all-reduce, a ring of N devices sends 2(N - 1)/N times as many.
    total = 0
    for _, elements in collectives(program.as_text() or ""):
        for dtype, count in elements.items():
            bits = re.search(r"\d+", dtype)  # XLA's names of types have their bits.
            total += count * max(1, int(bits.group()) // 8 if bits else 1)
    return total


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
    """The floating-point operations of an update, and the peak of all devices."""

    per_update: float | None  # None if XLA does not count them.
    peak_per_s: float | None

    def rates(self, *, updates: int, seconds: float) -> dict[str, float]:
        """Returns the known columns of updates that took so long, with all waits."""
        if self.per_update is None:
            return {}
        per_s = self.per_update * updates / seconds
        found = {"flops_per_update": self.per_update, "flops_per_s": per_s}
        return found | ({"mfu": per_s / self.peak_per_s} if self.peak_per_s else {})


def count_flops(compiled: CompiledFunctions, state: Any, feed: Feed) -> UpdateFlops:
    """Counts the floating-point operations of one update; compiles nothing."""
    traced = compiled.trace(state, feed)
    # The runs of a search share their program, and jax keeps one jaxpr for it.
    if traced.jaxpr not in _counted:
        _counted[traced.jaxpr] = program_flops(traced.lower())
    return UpdateFlops(_counted[traced.jaxpr], peak_flops_per_s(compiled.mesh))


_counted: weakref.WeakKeyDictionary[Any, float | None] = weakref.WeakKeyDictionary()


def program_flops(lowered: Any) -> float | None:
    """Returns the operations of a lowered program, over all its devices."""
    # `Lowered.cost_analysis` asks the client of the devices, and those of GPUs and TPUs
    # do not count. The CPU's client does, unless JAX_PLATFORMS leaves out the CPU.
    try:
        host = jax.local_devices(backend="cpu")[0].client
    except RuntimeError:
        return None
    module = lowered.compiler_ir("hlo").as_hlo_module()
    return _jax.hlo_module_cost_analysis(host, module).get("flops") or None


def peak_flops_per_s(mesh: Mesh) -> float | None:
    """Returns the devices' peak in bfloat16; None with an unknown device."""
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
