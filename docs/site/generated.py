"""What the site takes from the code: the fields of configs, and what can be typed."""

import argparse
import io
import re
import tokenize
from pathlib import Path
from typing import Any

from sphinx.util.docutils import SphinxDirective

from echo_jax import config
from echo_jax.cli_parser import make_parser

_FIELD = re.compile(r"\s*config\.([\w.]+) = (.+?)\s*(?:#.*)?$")


def config_fields(source: str) -> list[tuple[str, str, str]]:
    """Returns name, default and description of every field that a source sets.

    The description is the comment behind the field, or in the lines above it.

    Args:
      source: Of `echo_jax.config.default_config`.
    """
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    fields = []
    lines = source.split("\n")
    for number, line in enumerate(lines, start=1):
        found = _FIELD.match(line)
        if not found or found[2].startswith("ConfigDict("):
            continue
        said = [comments[number]] if number in comments else []
        above = number - 1
        while above in comments and lines[above - 1].strip().startswith("#"):
            said.insert(0, comments[above])
            above -= 1
        fields.append((found[1], found[2], " ".join(said)))
    return fields


class ConfigFields(SphinxDirective):
    """A table of the fields that every config has."""

    def run(self) -> list[Any]:
        """Returns its nodes."""
        rows = ["| field | default | |", "| --- | --- | --- |"]
        path = Path(config.__file__)
        self.env.note_dependency(str(path))
        for name, default, said in config_fields(path.read_text(encoding="utf-8")):
            cells = (f"`{name}`", f"`{default}`", said)
            rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        return self.parse_text_to_nodes("\n".join(rows))


class Commands(SphinxDirective):
    """What every command says with ``--help``."""

    def run(self) -> list[Any]:
        """Returns its nodes."""
        text = []
        for name, parser in _commands(make_parser(), ["echo-jax"]):
            said = parser.format_help().rstrip()
            text += [f"## {name}", "", "```text", said, "```", ""]
        return self.parse_text_to_nodes("\n".join(text), allow_section_headings=True)


def _commands(
    parser: argparse.ArgumentParser, name: list[str]
) -> list[tuple[str, argparse.ArgumentParser]]:
    """Returns a command and those within it."""
    found = [(" ".join(name), parser)]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, each in action.choices.items():
                found += _commands(each, [*name, word])
    return found


def setup(app: Any) -> dict[str, bool]:
    """Adds the directives."""
    app.add_directive("config-fields", ConfigFields)
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True}
