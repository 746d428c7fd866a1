"""Devices that are not here, for which XLA compiles all the same.

The compiler for TPUs comes with libtpu, that for GPUs with jax's plugin for CUDA: the
extra ``aot`` has both. Nothing can be run or timed on such devices.
"""

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.experimental import topologies

__all__ = ["MissingCompilerError", "Target", "make_target", "not_cached"]

_TPUS = ("v4", "v5e", "v5p", "v6e")
_TPU = re.compile(rf"({'|'.join(_TPUS)}):\d+(x\d+)+")
_H100 = re.compile(r"h100x([1-9]\d{0,3})")
# Without a GPU nothing can be timed, and Triton's own programs are made by timing.
_UNTIMED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
# As XLA describes it; NVIDIA's data sheet of the H100 SXM.
_H100_DESCRIPTION = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 1 patch: 1 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  threads_per_warp: 32
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""


class MissingCompilerError(RuntimeError):
    """The compiler for a target is not installed; the message names what brings it."""


@dataclass(frozen=True)
class Target:
    """Devices that are not here.

    Attributes:
      name: As `make_target` was given it.
      devices: In jax's order; good for shardings of shapes, and for nothing else.
      options: Of XLA, without which it would ask the devices.
    """

    name: str
    devices: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def compile(self, lowered: Any) -> Any:
        """Compiles a program that was lowered for the devices; see `not_cached`.

        Args:
          lowered: From ``jax.jit(...).lower(...)``.
        """
        with not_cached():
            return lowered.compile(compiler_options=dict(self.options))


@contextlib.contextmanager
def not_cached() -> Iterator[None]:
    """Keeps what is compiled within out of jax's cache of compiled programs.

    It could not load what is for devices that are not here.
    """
    before = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def make_target(name: str) -> Target:
    """Returns devices to compile for, by their name.

    Args:
      name: ``KIND:TOPOLOGY`` of TPUs, v4, v5e, v5p or v6e, such as ``"v5e:2x2"``; or
        ``h100xN``, N of them in one node.

    Raises:
      MissingCompilerError: What compiles for them is not installed.
      ValueError: There is no such target.

    Example:
      >>> len(make_target("v5e:2x2").devices)
      4
    """
    if number := _H100.fullmatch(name):
        _require("jax_plugins.xla_cuda12", name, "jax-cuda12-plugin")
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="h100",
            topology=f"1x1x{number[1]}",
            target_config=_H100_DESCRIPTION,
        )
        return Target(name, tuple(topology.devices), _UNTIMED)
    if not _TPU.fullmatch(name):
        raise ValueError(
            f"--target={name} is no target; use {', '.join(_TPUS)} with a topology, "
            "such as v5e:2x2, or h100xN, such as h100x4"
        )
    _require("libtpu", name, "libtpu")
    # It would ask the cloud's metadata which hosts there are, and refuse to be on one
    # machine with another, as two that use a TPU must not be.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"--target={name} is no topology that libtpu knows ({reason}); use one "
            "that is sold, such as v5e:2x2"
        ) from error
    return Target(name, tuple(topology.devices))


def _require(module: str, target: str, package: str) -> None:
    """Refuses a target whose compiler is not installed."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # Nor is the package that it would be in.
        found = None
    if found is None:
        raise MissingCompilerError(
            f"--target={target} needs {package}, which is not installed; install it "
            "with pip install 'echo-jax[aot]'"
        )
