"""Pages of the site that are made from the code say all of it, and all of it once."""

import argparse
import ast
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

from echo_jax.cli import make_parser
from echo_jax.config import default_config

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs/site"))
reference = importlib.import_module("reference")
sys.path.pop(0)

SOURCE = inspect.getsource(default_config)
FIELDS = reference.fields_page(default_config(), SOURCE)


def leaves(config, prefix=""):
    for name, value in config.items():
        if hasattr(value, "keys"):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def test_every_field_has_one_row_with_its_default_below_its_group():
    group, found = "", []
    for line in FIELDS.split("\n"):
        if line.startswith("## "):
            group = line[3:]
        elif row := re.match(r"\| `([\w.]+)` \| `(.*?)` \|", line):
            found.append((row[1], ast.literal_eval(row[2])))
            assert group == (row[1].split(".")[0] if "." in row[1] else "run")
    assert len(found) > 100
    assert sorted(found) == sorted(leaves(default_config()))
    # 1 is not 1.0 here: a flag takes what the default's type takes.
    assert {(n, type(v)) for n, v in found} == {
        (n, type(v)) for n, v in leaves(default_config())
    }


def test_every_comment_of_the_source_is_told_once():
    text = " ".join(FIELDS.split())
    comments = re.findall(r"# (.+)", SOURCE)
    assert len(comments) > 80
    for each in comments:
        said = each.strip().replace("|", "/")
        assert text.count(said) >= comments.count(each), f"nothing is told of: {each}"


def commands(parser, name="echo-jax"):
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, each in action.choices.items():
                yield from commands(each, f"{name} {word}")


def sections():
    found = re.findall(
        r"(?ms)^## (.+?)\n\n```text\n(.*?)\n```$",
        reference.commands_page(make_parser()),
    )
    assert len(dict(found)) == len(found)
    return dict(found)


def test_every_command_has_one_section_with_each_of_its_options():
    pages, known = sections(), dict(commands(make_parser()))
    assert pages.keys() == known.keys() and len(pages) > 15
    for name, parser in known.items():
        text = " ".join(pages[name].split())
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for each in action._choices_actions:
                    assert text.count(f" {each.dest} {each.help}") == 1, (name, each)
                continue
            said = " ".join((action.help % vars(action)).split())
            assert f" {said}" in text, (name, said)
            for option in action.option_strings:
                line = rf"(?m)^  (?:-\w, )?{option}(?![\w-])"
                defined = re.findall(line, pages[name])
                assert len(defined) == 1, (name, option)
            if action.default and action.default != argparse.SUPPRESS:
                default = action.default
                shown = default if isinstance(default, str) else f"{default:g}"
                assert f"(default: {shown}" in said, (name, action.dest)


@pytest.mark.parametrize("columns", ["40", "200"])
def test_the_help_on_the_site_is_as_wide_in_every_terminal(columns, monkeypatch):
    here = sections()
    monkeypatch.setenv("COLUMNS", columns)
    assert sections() == here
    assert max(map(len, "\n".join(here.values()).split("\n"))) <= 88
