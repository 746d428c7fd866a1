"""Directives of the site for what `reference` takes from the code."""

from typing import Any

from reference import commands_page, fields_page
from sphinx.util.docutils import SphinxDirective

from echo_jax import config
from echo_jax.cli.parser import make_parser


class ConfigFields(SphinxDirective):
    """Tables of the fields of configs."""

    def run(self) -> list[Any]:
        """Returns their nodes."""
        self.env.note_dependency(str(config.__file__))
        return self.parse_text_to_nodes(fields_page(), allow_section_headings=True)


class Commands(SphinxDirective):
    """What every command says with ``--help``."""

    def run(self) -> list[Any]:
        """Returns its nodes."""
        text = commands_page(make_parser())
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(app: Any) -> dict[str, bool]:
    """Adds the directives."""
    app.add_directive("config-fields", ConfigFields)
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True}
