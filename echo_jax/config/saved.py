"""Reads the config that a run folder keeps."""

from typing import Any

from etils import epath
from ml_collections import ConfigDict

from echo_jax.config import Config, default_config, override
from echo_jax.config.optimizer import parse_args
from echo_jax.config.run import RunSpec
from echo_jax.files.json_files import DamagedFileError, read_json
from echo_jax.studies.fields import with_names_of_now

_CONFIG: dict[str, Any] = {"workload": str, "model": dict, "data": dict}


# Fields that change no computation are not kept and get their defaults. Decisions are
# not repeated from a log, and no process reads data: neither changes a program.
def read_config(workdir: epath.Path) -> RunSpec:
    """Returns the config of a run."""
    path = workdir / "config.json"
    fields = read_json(path, _CONFIG)
    if fields is None:
        raise ValueError(
            f"{workdir} holds no config.json, so it is no run folder; name the "
            "--workdir of 'echo-jax train'"
        )
    fields = with_names_of_now(fields)
    config = default_config()
    try:
        with config.unlocked():
            config.model = ConfigDict(_hashable(fields.pop("model")))
            for name, value in fields["data"].items():
                if name not in config.data:  # A field of a workload.
                    config.data[name] = _hashable(value)
        override(config, fields)
        options = parse_args(config.xla.options, "xla.options")
        if texts := [name for name, value in options.items() if type(value) is str]:
            raise ValueError(
                f"config.xla.options sets {texts[0]} to a text, which may name a file "
                "that XLA writes: give the run's config file to --config"
            )
        config.echo.replay = ""
        config.data.workers = 0
        return RunSpec.of(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(path, error) from error


def _hashable(value: Any) -> Any:
    """Returns a JSON value with tuples for lists, as configs have them."""
    if isinstance(value, dict):
        return {name: _hashable(each) for name, each in value.items()}
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def refuse_code(config: Config) -> None:
    """Refuses a data class to import: a config may name code, a run folder may not."""
    if config.data.source.startswith("python:"):
        raise ValueError(
            f"config.data.source={config.data.source!r} names code, which is not run "
            "for a run folder: give its config file to --config"
        )
