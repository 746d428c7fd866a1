"""The command line, ``echo-jax COMMAND``."""

from echo_jax.cli.commands import main
from echo_jax.lazy import door

__all__ = ["main"]

__getattr__ = door(__name__, {"parser": ["make_parser"]})
