"""Training of a workload: sharded, resumable, and timed."""

from echo_jax.lazy import door
from echo_jax.training.loop import train
from echo_jax.training.measure import Rates, calibrate
from echo_jax.training.processes.stop import DataTimeoutError, Interrupted
from echo_jax.training.window import NonFiniteLossError

__all__ = [
    "DataTimeoutError",
    "Interrupted",
    "NonFiniteLossError",
    "Rates",
    "calibrate",
    "train",
]

__getattr__ = door(
    __name__,
    {
        "clock": ["Clock", "DeviceTime"],
        "compiled": ["next_group"],
        "evaluation": ["evaluate"],
        "measure": ["measure_loader", "probe_config"],
        "window": ["MAX_METRICS"],
    },
)
