"""The command ``echo-jax configs``: its options and its output."""

import argparse
import os
import textwrap
from collections.abc import Callable
from typing import Any

from echo_jax.cli.command_end import typed_config
from echo_jax.config import load_config
from echo_jax.config.files import copy_config, import_config, packaged_configs
from echo_jax.config.study import field_lines
from echo_jax.terminal.printable import printable

_EPILOG = """\
Each is a value of --config by its name alone, or NAME:VARIANT. Variants of cifar, coco,
imagenet and lm may be joined by commas: lm:wikitext2,tiny. A copy is yours to change,
and is named by its path.

examples:
  echo-jax configs
  echo-jax configs show lm:tiny
  echo-jax study --config quickstart:tiny --workdir runs/quickstart
  echo-jax configs copy lm
  echo-jax train --config configs/lm.py:tiny --workdir runs/lm"""

_INDENT = " " * 4
_WRAPPER = textwrap.TextWrapper(88, initial_indent=_INDENT, subsequent_indent=_INDENT)


def add_command(add: Callable[..., Any]) -> None:
    """Adds the command with its subcommands."""
    configs = add("configs", "list the configs that come along, or copy one", _EPILOG)
    actions = configs.add_subparsers(dest="action", metavar="show | copy")
    about = "show every field of a config as the flag that sets it"
    show = add("show", about, "example:\n  echo-jax configs show lm:tiny", actions)
    show.add_argument("name", metavar="CONFIG[:VARIANT]", help="as --config takes it")
    about = "copy a config that comes along, and what it imports, to change it"
    copy = add("copy", about, "example:\n  echo-jax configs copy lm", actions)
    copy.add_argument("name", metavar="NAME", help="as 'echo-jax configs' lists it")
    copy.add_argument(
        "folder",
        nargs="?",
        default="configs",
        metavar="FOLDER",
        help="receives it (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> list[str]:
    """Runs the command and returns the texts to print."""
    if args.action == "show":
        return [_shown(args.name)]
    return [_copied(args.name, args.folder) if args.action else _listed()]


def _listed() -> str:
    said = []
    for name, path in packaged_configs().items():
        module = import_config(path)
        about, *_ = (module.__doc__ or "").splitlines()
        variants = "  ".join(f":{variant}" for variant in module.VARIANTS)
        said += [name, f"{_INDENT}{about}", *_WRAPPER.wrap(variants)]
    return "\n".join(said)


def _shown(name: str) -> str:
    said = []
    for flag, about in field_lines(typed_config(name, ())):
        said += [printable(flag), *_WRAPPER.wrap(about)]
    return "\n".join(said)


def _copied(name: str, folder: str | os.PathLike[str]) -> str:
    copies = copy_config(name, folder)
    config = str(copies[0])
    verb = "study" if "arms" in load_config(name) else "train"
    run = name.rpartition("/")[2]
    command = f"echo-jax {verb} --config {config} --workdir runs/{run}"
    return "\n".join([*map(printable, copies), "", printable(command)])
