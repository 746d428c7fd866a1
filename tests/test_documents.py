"""What README, docs and notebooks name exists, and the site says all of the code."""

import argparse
import importlib
import importlib.util
import itertools
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import echo_jax
from echo_jax.cli import make_parser
from echo_jax.config import check_config, default_config, load_with_flags
from echo_jax.echo.orders import ORDERS

ROOT = Path(__file__).parents[1]


def texts_of(*patterns: str) -> dict[str, str]:
    """The texts of files of the project, by their names in it."""
    paths = itertools.chain.from_iterable(map(ROOT.glob, patterns))
    return {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in paths}


DOCUMENTS = texts_of("README.md", "docs/*.md", "docs/site/index.md", "notebooks/*.py")
HELP = texts_of("echo_jax/cli/parser.py", "echo_jax/*/*_command*.py", "configs/**/*.py")
SOURCE = "\n".join(
    texts_of("echo_jax/**/*.py", "benchmarks/**/*.py", "configs/**/*.py").values()
)
SCRIPTS = "\n".join(texts_of("*.sh", "launch/*").values())
PACKAGE = ROOT / "echo_jax"

# Of pip, jupytext, Slurm, SkyPilot, gcloud and tensorboard.
FOREIGN_OPTIONS = {"--extra-index-url", "--logdir", "--quiet", "--sync", "--time"}
FOREIGN_OPTIONS |= {"--data-disk", "--gpus-per-node"}
# Of torch and kauldron.
FOREIGN_CLASSES = {"DynamicScale", "DataLoader", "IterableDataset", "PyGrainPipeline"}
# In a run folder, or a permission in a bucket.
FOREIGN_PATHS = re.compile("checkpoints/|profile/|roles/")


def _in_documents(pattern: str) -> Iterator[tuple[str, str]]:
    """Yields where it stands and what is found, of everything that matches."""
    for name, text in DOCUMENTS.items():
        for found in re.findall(pattern, text):
            yield name, found


def _in_ticks(pattern: str) -> Iterator[tuple[str, str]]:
    return _in_documents(rf"`{pattern}`")


def _known(name: str) -> Any:
    """Returns what a dotted name of the project means."""
    words = name.split(".")
    if words[1] == "tfdata":
        # Its import takes ten seconds, for the one name that it has.
        assert words[2:] in ([], ["echo"]), name
        return None
    found, at = echo_jax, 1
    if not name.startswith("ej."):
        # A package may be hidden by a function of its name.
        while importlib.util.find_spec(".".join(words[: at + 1])):
            at += 1
            found = importlib.import_module(".".join(words[:at]))
            if at == len(words) or not hasattr(found, "__path__"):
                break
    for word in words[at:]:
        found = getattr(found, word)
    return found


def test_every_name_of_the_library_exists():
    names = list(_in_documents(r"\b(?:ej|echo_jax)(?:\.\w+)+"))
    assert len(names) > 30
    for where, name in names:
        try:
            _known(name)
        except (AttributeError, ImportError) as error:
            pytest.fail(f"{where}: {name}: {error}")


def test_every_class_is_in_the_source():
    for where, name in _in_ticks(r"([A-Z][a-z]+\w*)(?:\.\w+)?(?:\([^`]*\))?"):
        assert name in FOREIGN_CLASSES or re.search(rf"\b{name}\b", SOURCE), (
            f"{where}: there is no {name}"
        )


def test_every_field_of_a_config_exists():
    fields = {"model.txt"}  # A file is no field, but looks like one.
    golden = json.loads((ROOT / "tests/configs/golden.json").read_text("utf-8"))
    for field in itertools.chain.from_iterable(golden.values()):
        parts = field.split(".")
        # With the groups that it is in, alone and in the base of a study.
        fields |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        fields |= {field.removeprefix("base."), f"base.{field}"}
    groups = [
        name for name, value in default_config().items() if hasattr(value, "keys")
    ]
    named = [
        *_in_ticks(rf"(?:config\.)?((?:{'|'.join(groups)})\.\w+(?:\.\w+)*)(?:=[^`]*)?"),
        *_in_documents(r"--config\.([a-z_]\w*(?:\.\w+)*)"),
    ]
    assert len(named) > 30
    for where, field in named:
        assert field in fields, f"{where}: there is no config.{field}"


KINDS = "train|study|sweep|probe|report|evaluate|predict|export|configs|prepare"
_REST = r"[^`#;&\n]+"


def _commands() -> Iterator[tuple[str, str]]:
    """Yields every command line that can be typed as it stands, in ``--help``, too."""
    typed = rf"(?m)(?:^ *|&& |do |; |`)(?:[A-Z_]+=\S+ )*(echo-jax (?:{KINDS}) {_REST})"
    for name, text in (DOCUMENTS | HELP).items():
        text = re.sub(r"\\+\n\s*", "", text.replace('"""', "\n"))
        for line in re.findall(typed, text):
            yield name, line
        for options in re.findall(rf" -- (--config {_REST})", text):
            yield name, f"echo-jax train {options}"


def test_every_command_can_be_parsed_with_its_config():
    parser, checked, num_configs = make_parser(), set(), 0
    for where, line in _commands():
        # Of a loop of the shell: $((8*n)), and a variant of its own.
        words = shlex.split(re.sub(r":\$\w+", "", re.sub(r"\$\(\(.*?\)\)", "8", line)))
        if "--help" in words or "|" in words:
            continue
        try:
            args, extras = parser.parse_known_args(words[1:])
        except SystemExit:
            pytest.fail(f"{where}: {line}")
        name = getattr(args, "config", None)
        if name and name != "CONFIG":
            num_configs += 1
            path = str(ROOT / name) if ".py" in name else name
            if (path, *extras) not in checked:
                checked.add((path, *extras))
                config = load_with_flags(path, extras)
                check_config(config.get("base", config))
        else:
            assert not extras, f"{where}: {line}"
    assert num_configs > 30


def test_every_option_exists():
    for where, option in _in_documents(r"(?<![\w-])(--[a-z][a-z-]*)(?![\w.-])"):
        assert (
            option in FOREIGN_OPTIONS
            or f'"{option}"' in SOURCE
            or option in SCRIPTS
            or option in ("--config", "--help")
        ), f"{where}: nothing takes {option}"


def test_every_file_exists():
    for where, path in _in_ticks(r"((?:\.\./)?[\w.*-]+/[\w./*-]*)(?:[: ][^`]*)?"):
        if re.search("[A-Z]{3}", path) or FOREIGN_PATHS.match(path):
            continue
        folders = (ROOT, PACKAGE, PACKAGE / "echo", ROOT / "notebooks")
        assert any(
            [*folder.glob(path.rstrip("/")), *folder.glob(f"{path}.py")]
            for folder in folders
        ), f"{where}: there is no {path}"
    for where, link in _in_documents(r"\]\(([^)#]+)\)"):
        if "://" not in link:
            assert (ROOT / where).parent.joinpath(link).exists(), f"{where}: {link}"


def test_the_site_lists_every_page():
    listed = DOCUMENTS["docs/site/index.md"].rpartition("## ")[2]
    for page in ROOT.glob("docs/*.md"):
        assert re.search(rf"(?m)^(?:.*<)?\.\./{page.stem}>?$", listed), page.stem


def test_the_orders_of_the_first_explanation_are_real():
    page = DOCUMENTS["docs/concepts.md"]
    for order in ORDERS:
        spec = echo_jax.EchoSpec(2, order=order, buffer=8, batch_size=2)
        uses = " ".join(echo_jax.echo("abcdefghijkl", spec))
        assert re.search(rf"(?m)^{order} +{uses}$", page), f"{order} {uses}"


def test_the_constraints_are_the_versions_of_the_published_results():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    recorded = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in ROOT.glob("results/*/*/environment.json")
    ]
    assert len(recorded) > 20
    for environment in recorded:
        assert f"Python {environment['python']}:" in lines[0]
        del environment["versions"]["echo-jax"]
        assert environment["versions"].items() <= pinned.items()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for each in project["project"]["dependencies"]:
        assert re.match(r"[\w-]+", each)[0] in pinned


sys.path.insert(0, str(ROOT / "docs/site"))
reference = importlib.import_module("reference")
sys.path.pop(0)


def leaves(config, prefix=""):
    for name, value in config.items():
        if hasattr(value, "keys"):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def test_the_site_has_a_row_for_every_field_and_says_what_each_is():
    found, group = {}, ""
    for line in reference.fields_page().split("\n"):
        if line.startswith("## "):
            group = line[3:]
        elif row := re.match(r"\| `([\w.]+)` \| `(.*?)` \| (.*) \|", line):
            found[group, row[1]] = row[2]
            assert len(row[3]) > 1 and row[3][:1] != "|", f"nothing is said of {row[1]}"
    # As it is written: a flag takes what the default's type takes, and 1 is not 1.0.
    for workload in reference.FIELDS:
        for name, value in leaves(default_config(workload)):
            first, _, rest = name.partition(".")
            groups = (first if rest else "run", f"{first} of {workload}")
            (default,) = {found[g, name] for g in groups if (g, name) in found}
            assert default == repr(value) or name == "workload"
    assert found["study", "search.points"] == "16"


def commands(parser, name="echo-jax"):
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, each in action.choices.items():
                yield from commands(each, f"{name} {word}")


def test_the_site_shows_every_command_with_each_of_its_options(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    page = reference.commands_page(make_parser())
    assert max(map(len, page.split("\n"))) <= 88
    pages = dict(re.findall(r"(?ms)^## (.+?)\n\n```text\n(.*?)\n```$", page))
    known = dict(commands(make_parser()))
    assert pages.keys() == known.keys() and len(pages) > 15
    for name, parser in known.items():
        text = " ".join(pages[name].split())
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                continue
            said = " ".join((action.help % vars(action)).split())
            assert f" {said}" in text, (name, said)
            for option in action.option_strings:
                line = rf"(?m)^  (?:-\w, )?{option}(?![\w-])"
                assert len(re.findall(line, pages[name])) == 1, (name, option)
            if action.default and action.default != argparse.SUPPRESS:
                default = action.default
                shown = default if isinstance(default, str) else f"{default:g}"
                assert f"(default: {shown}" in said, (name, action.dest)
