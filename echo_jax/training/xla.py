"""XLA's program of an update: its options, its operations, what it sends, its trace.

In ``XLA_FLAGS`` an unknown option ends the process; here it is an error with its name.

XLA counts the operations of one update's program before it is compiled. Once compiled,
a GPU's matrix products are calls of a library, which XLA counts as nothing
(github.com/jax-ml/jax/issues/22249), and the program is for a single device. XLA
counts the body of a scan once, so a group of updates is not counted as one program.

The trace of `jax.profiler`, for TensorBoard or XProf, begins and ends with no update in
flight, so it has whole updates only. It ends early where the loop evaluates or saves.
Each process traces its own devices.
"""

import contextlib
import math
import re
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import Mesh

from echo_jax.config.optimizer import parse_args
from echo_jax.config.run import RunSpec
from echo_jax.files.folders import write
from echo_jax.training.processes.distributed import all_gather

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


def xla_options(config: RunSpec, platform: str, kind: str = "") -> XlaOptions:
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


# "%name = type opcode(operands), attributes". The type of the end of a collective, of
# one that has a start and an end, is of its result alone.
_COLLECTIVE = re.compile(
    r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute|ragged-all-to-all"
    r"|reduce-scatter)(?:-done)?\((.*)"
)
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
# On TPUs an all-reduce that runs beside other operations is printed in pieces.
_PIECE = re.compile(r'channel_id=(\d+).*chain_id="(\d+)"')


def collectives(text: str) -> list[tuple[str, Counter[str]]]:
    """Returns each collective's kind, and its result's elements by type."""
    counted: list[tuple[str, Counter[str]]] = []
    pieces: set[tuple[str, ...]] = set()
    for shape, kind, rest in _COLLECTIVE.findall(re.sub(r"/\*.*?\*/", "", text)):
        if piece := _PIECE.search(rest):
            if piece.groups() in pieces:
                continue
            pieces.add(piece.groups())
        elements: Counter[str] = Counter()
        for dtype, dims in _ARRAY.findall(shape):
            elements[dtype] += math.prod(int(each) for each in dims.split(",") if each)
        counted.append((kind, elements))
    return counted


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
        rates = {"flops_per_update": self.per_update, "flops_per_s": per_s}
        return rates | ({"mfu": per_s / self.peak_per_s} if self.peak_per_s else {})


def count_flops(traced: Any, mesh: Mesh) -> UpdateFlops:
    """Counts the operations of a traced update on a mesh; compiles nothing."""
    # The runs of a search share their program, and jax keeps one jaxpr for it.
    if traced.jaxpr not in _counted:
        _counted[traced.jaxpr] = program_flops(traced.lower())
    return UpdateFlops(_counted[traced.jaxpr], peak_flops_per_s(mesh))


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
    if " MIG " in kind:  # A part of a device.
        return None
    peaks = _PEAK_TFLOPS.items()
    return next((peak for name, peak in peaks if re.match(rf"{name}\b", kind)), None)


# A viewer takes every annotation with a number for a step.
_STEP = "training update"


class Profile:
    """Traces the updates of a run that ``config.profile`` asks for."""

    # The run is a `Trainer` that has not begun yet. If it resumes after these updates,
    # it keeps the trace. If it does them again, it traces them again.
    def __init__(self, run: Any):
        self._run = run
        self._own = run.workdir / "profile" / f"process-{jax.process_index()}"
        self._begun: int | None = None
        self._wanted = wanted = run.config.profile
        self._is_due = wanted.updates > 0 and run.totals.updates <= wanted.start

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Surrounds the next updates, and traces them if they are due."""
        run, wanted = self._run, self._wanted
        if self._is_due and run.totals.updates >= wanted.start:
            self._begin()
        if self._begun is None:
            yield
            return
        stops = (run.config.updates, run.config.eval_every, run.config.checkpoint_every)
        with jax.profiler.StepTraceAnnotation(_STEP, step_num=run.totals.updates):
            yield
            done = run.totals.updates
            is_last = done >= self._begun + wanted.updates or any(
                stop > 0 and done % stop == 0 for stop in stops
            )
            if is_last:
                self._finish_updates()
        if is_last:
            said = f"profiled update {self._begun + 1} to {done}"
            with run.clock.phase("pause"):
                self.close(keep=True)
            run.progress.note(f"{said}; see {self._own.parent}")

    def close(self, *, keep: bool = False) -> None:
        """Ends a trace that has begun, and drops it unless it is to be kept."""
        if self._begun is None:
            return
        self._begun = None
        jax.profiler.stop_trace()
        with self._written as folder:
            files = sorted(Path(folder).rglob("*")) if keep else []
            for file in files:
                if file.is_file():
                    copy = self._own / file.relative_to(folder).as_posix()
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    write(copy, file.read_bytes())

    def say_if_missed(self) -> None:
        """Says at the end of a run that nothing was traced, though it was asked for."""
        if self._is_due:
            self._run.progress.note(
                f"nothing was profiled: after update {self._wanted.start} of "
                "--config.profile.start no update began"
            )

    def _finish_updates(self) -> None:
        self._run.read(leave=0)
        jax.block_until_ready(self._run.state)

    def _begin(self) -> None:
        self._is_due = False
        self._finish_updates()
        with self._run.clock.phase("pause"):
            if self._own.exists():
                self._own.rmtree()
            # The profiler writes to local disks alone.
            self._written = tempfile.TemporaryDirectory()
            options = jax.profiler.ProfileOptions()
            # The calls of Python would be most of the trace, and slow the host down.
            options.python_tracer_level = 0
            jax.profiler.start_trace(self._written.name, profiler_options=options)
            self._begun = self._run.totals.updates
            # Together: who starts first would wait in the first collective.
            all_gather(None)
