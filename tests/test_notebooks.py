"""The notebooks: pairs of files in step, with outputs, ready for Colab, working."""

import copy
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SYNC = "run `jupytext --sync notebooks/*.py`"
AGAIN = "run `python docs/site/run_notebooks.py`"

# Where the project lies, as a GitHub "owner/name". The project names no address yet:
# once it does, in [project.urls], badges and install cells have to name it as well.
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
SLUG = URLS.get("Repository", "https://github.com/OWNER/REPO").split("github.com/")[1]

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

# What runs them and stores their outputs.
sys.path.insert(0, str(ROOT / "docs/site"))
storing = importlib.import_module("run_notebooks")
sys.path.pop(0)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def install_cell(path: Path) -> str:
    cell = read(path).cells[1]
    assert cell.cell_type == "code"
    return cell.source


def test_every_notebook_is_a_pair():
    assert len(NOTEBOOKS) == 4
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    assert {path.stem for path in NOTEBOOKS} == scripts
    assert len({install_cell(path) for path in NOTEBOOKS}) == 1
    assert 'TINY = os.environ.get("ECHO_JAX_TINY") == "1"' in install_cell(NOTEBOOKS[0])


@each_notebook
def test_the_two_files_say_the_same(path):
    notebook = read(path)
    script = jupytext.read(path.with_suffix(".py"))
    again = jupytext.reads(jupytext.writes(notebook, "py:percent"), "py:percent")
    for one in (notebook, again):
        for mine, other in zip(one.cells, script.cells, strict=True):
            assert mine.cell_type == other.cell_type, SYNC
            assert mine.source == other.source, SYNC
    assert notebook.metadata.kernelspec == script.metadata.kernelspec, SYNC


@each_notebook
def test_a_notebook_is_valid_whole_of_no_machine_and_opens_in_colab(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.keys() == {"jupytext", "kernelspec", "outputs_of_code"}
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert cell.metadata.keys() <= {"lines_to_next_cell"}
    assert storing.what_is_wrong(notebook) == [], AGAIN
    changed = copy.deepcopy(notebook)
    changed.cells[1].source += "\n"
    assert "its code has changed since it was run" in storing.what_is_wrong(changed)
    badge = notebook.cells[0].source
    address = "https://colab.research.google.com/github/"
    assert re.findall(rf"\]\(({address}[^)]*)\)", badge) == [
        f"{address}{SLUG}/blob/main/notebooks/{path.name}"
    ]
    # Whoever opens it has to be told what a placeholder is.
    assert SLUG != "OWNER/REPO" or "replace `OWNER/REPO`" in badge
    source = f'ECHO_JAX = "echo-jax[export] @ git+https://github.com/{SLUG}"'
    assert source in install_cell(path)


def test_the_install_cell_installs_echo_jax_where_it_is_not(monkeypatch):
    commands = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, check: commands.append(command)
    )
    source = install_cell(NOTEBOOKS[0])
    exec(source, {})
    assert not commands
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="Set ECHO_JAX"):
        exec(source.replace(SLUG, "OWNER/REPO"), {})
    assert not commands  # A placeholder is never installed, and nothing is cloned.
    wheel = "echo-jax[export] @ https://example.org/echo_jax-0.1.0-py3-none-any.whl"
    source = source.replace(f"echo-jax[export] @ git+https://github.com/{SLUG}", wheel)
    # An older NumPy that is imported already would stay.
    with pytest.raises(SystemExit, match="Restart the session"):
        exec(source, {})
    monkeypatch.delitem(sys.modules, "numpy")
    exec(source, {})
    assert commands == [[sys.executable, "-m", "pip", "install", "--quiet", wheel]] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
# The first and the third one are run beside the tests.
@pytest.mark.parametrize("path", NOTEBOOKS[1::2], ids=lambda path: path.stem)
def test_a_notebook_runs_in_tiny_mode(path, monkeypatch):
    monkeypatch.setenv("ECHO_JAX_TINY", "1")
    notebook = read(path)
    # Raises CellExecutionError, which shows the cell and the traceback.
    NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    assert [o.text for o in outputs if o.get("name") == "stderr"] == []
    figures = [o for o in outputs if "image/png" in o.get("data", {})]
    shows = sum(
        storing.num_pictures(cell.source)
        for cell in notebook.cells
        if cell.cell_type == "code"
    )
    assert len(figures) == shows > 0
