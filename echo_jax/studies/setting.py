"""The setting of a training in words: data, model, batch and optimizer."""

from collections.abc import Mapping
from typing import Any

from echo_jax.files.json_files import missing

__all__ = ["FIELDS", "setting_in_words"]

FIELDS: dict[str, Any] = {
    "target": int | float,
    "batch_size": int,
    "workload": str,
    "model": dict,
    "data.source": str,
    "optim.name": str,
    "optim.schedule": str,
    "optim.warmup_updates": int,
}
"""The fields of a config that it is said by, and their types."""


def setting_in_words(config: Mapping[str, Any]) -> str:
    """Returns the setting of a config in words; "" if it lacks one of `FIELDS`."""
    if missing(config, FIELDS):
        return ""
    model = ", ".join(f"{name} {value}" for name, value in config["model"].items())
    optim = config["optim"]
    target = f", to {config['target']:g}" if config["target"] else ""
    return (
        f"{config['workload']} on {config['data']['source']} ({model}), batches of "
        f"{config['batch_size']}, {optim['name']}, {optim['schedule']} rate after "
        f"{optim['warmup_updates']} updates{target}"
    )
