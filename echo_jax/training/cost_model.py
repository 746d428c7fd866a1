"""What data parallelism costs, by arithmetic: bytes, seconds, efficiency, and noise.

Nothing here is measured. Seconds are those of the bandwidth alone: latencies of hops
and what a network loses beside it come on top.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = [
    "Exchange",
    "NoiseScale",
    "Scaling",
    "describe_cost",
    "gradient_noise_scale",
    "noise_of_parts",
    "parameter_server",
    "reduce_scatter_all_gather",
    "ring_all_reduce",
]


@dataclass(frozen=True)
class Exchange:
    """What it takes to sum gradients over devices once.

    Attributes:
      name: Of the algorithm.
      device_bytes: That each device sends.
      seconds: In which they are sent.
      server_bytes: That a server sends; 0 if there is none.
    """

    name: str
    device_bytes: float
    seconds: float
    server_bytes: float = 0.0


def parameter_server(
    gradient_bytes: float, num_devices: int, bytes_per_s: float
) -> Exchange:
    """Returns what one server takes, with links like those of the devices.

    Each of N devices sends its gradients to it and gets the sum back. The server's own
    link carries all of them: N G bytes in, and then N G out.

    Args:
      gradient_bytes: G, on each device.
      num_devices: N, the server not among them.
      bytes_per_s: That a device, and the server, can send; and receive at once.

    Example:
      >>> parameter_server(100e6, 4, 1e9)
      Exchange(name='parameter server', device_bytes=100000000.0, seconds=0.8, \
server_bytes=400000000.0)
    """
    total = num_devices * gradient_bytes
    return Exchange("parameter server", gradient_bytes, 2 * total / bytes_per_s, total)


def ring_all_reduce(
    gradient_bytes: float, num_devices: int, bytes_per_s: float
) -> Exchange:
    """Returns what a ring of devices takes: 2 (N - 1)/N G bytes from each.

    Less cannot be sent (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations").

    Args:
      gradient_bytes: G, on each device.
      num_devices: N.
      bytes_per_s: That a device can send, and receive at once.

    Example:
      >>> ring_all_reduce(100e6, 4, 1e9)
      Exchange(name='ring all-reduce', device_bytes=150000000.0, seconds=0.15, \
server_bytes=0.0)
    """
    sent = 2 * (num_devices - 1) / num_devices * gradient_bytes
    return Exchange("ring all-reduce", sent, sent / bytes_per_s)


def reduce_scatter_all_gather(
    gradient_bytes: float,
    num_devices: int,
    bytes_per_s: float,
    *,
    param_bytes: float | None = None,
) -> Exchange:
    """Returns what it takes to scatter the sums, and to gather parameters.

    Each device gets the sum of 1/N of the gradients, updates its part, and gathers
    the parts of the others: (N - 1)/N (G + P) bytes, those of a ring's all-reduce if
    G = P. In return each holds 1/N of the optimizer's state (Rajbhandari et al. 2020,
    "ZeRO", section 5).

    Args:
      gradient_bytes: G, on each device.
      num_devices: N.
      bytes_per_s: That a device can send, and receive at once.
      param_bytes: P, of what is gathered; as many as of gradients by default.

    Example:
      >>> reduce_scatter_all_gather(50e6, 4, 1e9, param_bytes=100e6).seconds
      0.1125
    """
    gathered = gradient_bytes if param_bytes is None else param_bytes
    sent = (num_devices - 1) / num_devices * (gradient_bytes + gathered)
    return Exchange("reduce-scatter + all-gather", sent, sent / bytes_per_s)


@dataclass(frozen=True)
class Scaling:
    """Throughput on many devices: T = S N efficiency (Jia et al. 2018).

    It is weak scaling: a device computes the same, however many there are. The
    efficiency is no echo factor, though papers write e for both.

    Attributes:
      num_devices: N.
      examples_per_device: Of an update.
      compute_s: Seconds in which a device computes its part of an update.
      exchange_s: Seconds in which gradients are summed.

    Example:
      >>> Scaling(4, 128, compute_s=0.04, exchange_s=0.01).examples_per_s
      10240.0
    """

    num_devices: int
    examples_per_device: float
    compute_s: float
    exchange_s: float

    @property
    def ratio(self) -> float:
        """Seconds of communication for each of computation."""
        return self.exchange_s / self.compute_s

    @property
    def efficiency(self) -> float:
        """The part of its time in which a device computes, if nothing overlaps."""
        return self.compute_s / (self.compute_s + self.exchange_s)

    @property
    def single_examples_per_s(self) -> float:
        """S: what a device does alone."""
        return self.examples_per_device / self.compute_s

    @property
    def examples_per_s(self) -> float:
        """T, if nothing overlaps; S N if all of the communication does."""
        return self.single_examples_per_s * self.num_devices * self.efficiency


def describe_cost(
    gradient_bytes: float,
    num_devices: int,
    *,
    bytes_per_s: float,
    examples_per_device: float,
    compute_s: float | None = None,
) -> str:
    """Says what each algorithm costs, and what that leaves of the throughput.

    Args:
      gradient_bytes: On each device.
      num_devices: How many sum them.
      bytes_per_s: That a device can send, and receive at once.
      examples_per_device: Of an update.
      compute_s: Seconds in which a device computes its part of an update; None if that
        is not known.

    Example:
      >>> print(describe_cost(
      ...     100e6, 4, bytes_per_s=1e9, examples_per_device=128, compute_s=0.45
      ... ))
      By arithmetic, not measured: 100 MB of gradients, 4 devices, 1 GB/s from each:
      parameter server               800 ms   a device sends 100 MB, the server 400 MB
      ring all-reduce                150 ms   a device sends 150 MB
      reduce-scatter + all-gather    150 ms   a device sends 150 MB
      ring to 450 ms of computation: ratio 0.333, efficiency 0.750 if nothing overlaps
      T = S N efficiency = 284 x 4 x 0.750 = 853 examples/s
    """
    algorithms = (parameter_server, ring_all_reduce, reduce_scatter_all_gather)
    costs = [each(gradient_bytes, num_devices, bytes_per_s) for each in algorithms]
    lines = [
        f"By arithmetic, not measured: {gradient_bytes / 1e6:.3g} MB of gradients, "
        f"{num_devices} devices, {bytes_per_s / 1e9:g} GB/s from each:"
    ]
    for cost in costs:
        sent = f"a device sends {cost.device_bytes / 1e6:.3g} MB"
        if cost.server_bytes:
            sent += f", the server {cost.server_bytes / 1e6:.3g} MB"
        lines.append(f"{cost.name:27} {cost.seconds * 1e3:6.3g} ms   {sent}")
    if compute_s is not None:
        of = Scaling(num_devices, examples_per_device, compute_s, costs[1].seconds)
        lines += [
            f"ring to {compute_s * 1e3:.3g} ms of computation: ratio {of.ratio:.3f}, "
            f"efficiency {of.efficiency:.3f} if nothing overlaps",
            f"T = S N efficiency = {of.single_examples_per_s:,.0f} x {num_devices} x "
            f"{of.efficiency:.3f} = {of.examples_per_s:,.0f} examples/s",
        ]
    return "\n".join(lines)


class NoiseScale(NamedTuple):
    """How noisy gradients are; see `gradient_noise_scale`.

    Attributes:
      squared_norm: Of the true gradient, |G|².
      variance: tr(Σ): of the gradients of single examples, summed over parameters.
    """

    squared_norm: Any
    variance: Any

    @property
    def examples(self) -> float:
        """The simple noise scale, tr(Σ) / |G|²; NaN where |G|² was estimated below 0.

        Batches well below it lose little by being larger; well above it, much.
        """
        return self.variance / self.squared_norm if self.squared_norm > 0 else math.nan


def gradient_noise_scale(
    part_norms: Sequence[float], norm: float, *, batch_size: int
) -> NoiseScale:
    """Estimates the noise of gradients from norms that data parallelism has at hand.

    The unbiased estimators of McCandlish et al. 2018, "An Empirical Model of
    Large-Batch Training", arXiv 1812.06162, appendix A.1, where the small batch is the
    part of a device, and the large one that of all. One update tells little: average
    `squared_norm` and `variance` over many, each by itself, before their ratio.

    Args:
      part_norms: Of the mean gradient of each part of a batch, all parts being equal;
        of each device before the sum, at least two.
      norm: Of the mean gradient of the whole batch.
      batch_size: Examples in the whole batch.

    Raises:
      ValueError: There are less than two parts, or they do not divide the batch.

    Example:
      >>> noise = gradient_noise_scale([3.0, 5.0], 4.0, batch_size=8)
      >>> noise.squared_norm, noise.variance, noise.examples
      (15.0, 8.0, 0.5333333333333333)
    """
    parts = len(part_norms)
    if parts < 2 or batch_size % parts:
        raise ValueError(
            f"part_norms has {parts} norms, of a batch of {batch_size}; give at least "
            "two, of equal parts of the batch"
        )
    square = sum(each**2 for each in part_norms) / parts
    return noise_of_parts(square, norm**2, batch_size // parts, parts)


def noise_of_parts(part_square: Any, square: Any, size: int, parts: int) -> NoiseScale:
    """Does what `gradient_noise_scale` does, of numbers or of arrays.

    Args:
      part_square: The mean of the squared norms of the parts' mean gradients.
      square: The squared norm of the mean gradient of the whole batch.
      size: Examples in a part.
      parts: How many there are, at least two.
    """
    # Of the whole batch, ``parts * size`` examples, in the paper's terms.
    squared_norm = (parts * square - part_square) / (parts - 1)
    variance = (part_square - square) * size * parts / (parts - 1)
    return NoiseScale(squared_norm, variance)
