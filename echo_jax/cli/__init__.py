"""The command line, ``echo-jax COMMAND``."""

from echo_jax.cli.commands import main

__all__ = ["main"]
