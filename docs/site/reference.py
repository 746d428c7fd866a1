"""Makes Markdown from the code for the site: fields of configs, and commands."""

import argparse
import functools
from collections.abc import Iterator
from typing import Any

from echo_jax.config.group import defaults_of, described
from echo_jax.config.run import RunSpec
from echo_jax.config.specs import DataSpec
from echo_jax.config.study import StudySpec
from echo_jax.config.workloads import FIELDS
from echo_jax.studies.fields import flat_fields

# The width of --help, whatever the terminal in which the site is made.
_HELP_COLUMNS = 88


def fields_page() -> str:
    """Lists the fields of a training, of each workload, and of a study.

    Fields without a group come first, below "run".

    Returns:
      Tables of field, default and description.
    """
    groups = {"run": RunSpec}
    for workload, (model, data) in FIELDS.items():
        groups |= {f"model of {workload}": model, f"data of {workload}": data}
    shared = {f"data.{name}" for name, _ in described(DataSpec)}
    rows: dict[str, list[str]] = {}
    for title, kind in (groups | {"study": StudySpec}).items():
        prefix = f"{title.split()[0]}." if " of " in title else ""
        defaults = flat_fields(defaults_of(kind), prefix)
        for name, said in described(kind, prefix):
            if name not in defaults or (" of " in title and name in shared):
                continue
            first, _, rest = name.partition(".")
            group = title if prefix or not rest or title == "study" else first
            cells = (f"`{name}`", f"`{defaults[name]!r}`", said.replace("|", "/"))
            rows.setdefault(group, []).append(" | ".join(cells))
    lines = []
    for group, of_group in rows.items():
        # MyST loses what stands before the first heading of a directive.
        lines += [f"## {group}", "", "| field | default | |", "| --- | --- | --- |"]
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
