"""Makes Markdown from the code for the site: fields of configs, and commands."""

import argparse
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from echo_jax.config.fields import described_fields

# The width of --help, whatever the terminal in which the site is made.
_HELP_COLUMNS = 88


def fields_page(config: Mapping[str, Any], source: str) -> str:
    """Lists the fields of a config, in the order of its source.

    A group has its name as title. Fields without a group come first, below "run".

    Args:
      config: With the defaults.
      source: The code of the function that makes it: see `described_fields`.

    Returns:
      Tables of field, default and description.
    """
    rows: dict[str, list[str]] = {"": []}
    about = {"": ""}
    for name, said in described_fields(source):
        value = functools.reduce(lambda at, word: at[word], name.split("."), config)
        is_group = hasattr(value, "keys")
        if is_group and "." not in name:
            rows[name], about[name] = [], said
            continue
        default = "" if is_group else f"`{value!r}`"
        cells = (f"`{name}`", default, said.replace("|", "/"))
        rows[name.split(".")[0] if "." in name else ""].append(" | ".join(cells))
    lines = []
    for group, of_group in rows.items():
        if not of_group:
            continue
        # MyST loses what stands before the first heading of a directive.
        lines += [f"## {group or 'run'}", "", about[group], ""]
        lines += ["| field | default | |", "| --- | --- | --- |"]
        lines += [f"| {row} |" for row in of_group] + [""]
    return "\n".join(lines)


def commands_page(parser: argparse.ArgumentParser) -> str:
    """Lists what a command and those within it say with ``--help``."""
    lines = []
    for name, each in _commands(parser, parser.prog):
        formatter: Any = functools.partial(each.formatter_class, width=_HELP_COLUMNS)
        each.formatter_class = formatter
        lines += [f"## {name}", "", "```text", each.format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def _commands(
    parser: argparse.ArgumentParser, name: str
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, each in action.choices.items():
                yield from _commands(each, f"{name} {word}")
