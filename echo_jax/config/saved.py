"""The config that a run folder keeps, as the config of a run again."""

from typing import Any

from ml_collections import ConfigDict

from echo_jax.config import Config, default_config, override
from echo_jax.config.optimizer import parse_args
from echo_jax.files.folders import RunPath
from echo_jax.files.json_files import DamagedFileError, read_json

__all__ = ["read_config", "refuse_code"]

_CONFIG: dict[str, Any] = {"workload": str, "model": dict, "data": dict}
_CHOSEN: dict[str, Any] = {"chosen?.echo_factor": int | float, "chosen?.threads": int}


def read_config(workdir: RunPath) -> Config:
    """Returns the config of a run, with what the run chose where it was left open.

    What is not kept, because it changes nothing that is computed, has its default.
    Decisions are not repeated from a log, and nothing is read in processes: the first
    is another file that may be gone, and both change no program.

    Args:
      workdir: The run folder.

    Returns:
      The config, locked, for `echo_jax.config.check.check_config` to look at.

    Raises:
      ValueError: The folder holds no config, or one that no run can have.
      FolderError: What lies there is no file.
    """
    path = workdir / "config.json"
    fields = read_json(path, _CONFIG)
    if fields is None:
        raise ValueError(
            f"{workdir} holds no config.json, so it is no run folder; name the "
            "--workdir of 'echo-jax train'"
        )
    config = default_config()
    try:
        with config.unlocked():
            config.model = ConfigDict(_hashable(fields.pop("model")))
            for name, value in fields["data"].items():
                if name not in config.data:  # One of a workload.
                    config.data[name] = _hashable(value)
        override(config, fields)
        _refuse_texts(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(path, error) from error
    chosen = (read_json(workdir / "environment.json", _CHOSEN) or {}).get("chosen", {})
    if chosen and config.echo.factor == "auto":
        config.echo.factor = chosen["echo_factor"]
    if chosen and config.data.threads == "auto":
        config.data.threads = chosen["threads"]
    config.echo.replay = ""
    config.data.workers = 0
    return config


def _hashable(value: Any) -> Any:
    """Returns JSON's values with tuples for lists, as configs have them."""
    if isinstance(value, dict):
        return {name: _hashable(each) for name, each in value.items()}
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _refuse_texts(config: Config) -> None:
    """Refuses options of XLA that could name files, which it would write."""
    for name, value in parse_args(config.xla.options, "xla.options").items():
        if isinstance(value, str):
            raise ValueError(
                f"config.xla.options sets {name} to a text, which may name a file, and "
                "is not done for a run folder: give its config file to --config"
            )


def refuse_code(config: Config) -> None:
    """Refuses data that is a class to be imported: a config may do that, no folder.

    For who opens the data of a run folder; its model can be loaded without.

    Args:
      config: From `read_config`.

    Raises:
      ValueError: It is such data.
    """
    if config.data.source.startswith("python:"):
        raise ValueError(
            f"config.data.source={config.data.source!r} names code, which is not run "
            "for a run folder: give its config file to --config"
        )
