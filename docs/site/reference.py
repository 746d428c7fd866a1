"""What the site takes from the code, as Markdown: fields of configs, and commands."""

import argparse
import functools
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["commands_page", "fields_page"]

_FIELD = re.compile(r"\s*config\.([\w.]+) = ")
# What --help is wrapped at, whatever the terminal in which the site is made.
_HELP_COLUMNS = 88


def fields_page(config: Mapping[str, Any], source: str) -> str:
    """Lists the fields of a config, in the order of its source.

    Fields of a group stand below its name; those of none come first, below "run".

    Args:
      config: With the defaults.
      source: Of the function that makes it. What is said of a field or a group is the
        comment behind its line, or in the lines above it.

    Returns:
      Tables of field, default and description.
    """
    rows: dict[str, list[str]] = {"": []}
    about = {"": ""}
    for name, said in _described(source):
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


def _described(source: str) -> Iterator[tuple[str, str]]:
    """Yields name and description of all that a source sets."""
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    lines = source.split("\n")
    for number, line in enumerate(lines, start=1):
        if not (found := _FIELD.match(line)):
            continue
        said = [comments[number]] if number in comments else []
        above = number - 1
        while above in comments and lines[above - 1].strip().startswith("#"):
            said.insert(0, comments[above])
            above -= 1
        yield found[1], " ".join(said)


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
