"""The notebooks: pairs of files in step, without outputs, ready for Colab, working."""

import importlib.util
import os
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

# Where the project lies, as a GitHub "owner/name". The project names no address yet:
# once it does, in [project.urls], badges and install cells have to name it as well.
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
SLUG = URLS.get("Repository", "https://github.com/OWNER/REPO").split("github.com/")[1]

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def cells(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def install_cell(path: Path) -> str:
    cell = read(path).cells[1]
    assert cell.cell_type == "code"
    return cell.source


def test_every_notebook_is_a_pair():
    assert len(NOTEBOOKS) == 4
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    assert {path.stem for path in NOTEBOOKS} == scripts


@each_notebook
def test_the_two_files_say_the_same(path):
    notebook = read(path)
    script = jupytext.read(path.with_suffix(".py"))
    assert cells(notebook) == cells(script), SYNC
    again = jupytext.reads(jupytext.writes(notebook, "py:percent"), "py:percent")
    assert cells(again) == cells(script), SYNC
    assert notebook.metadata.kernelspec == script.metadata.kernelspec, SYNC


@each_notebook
def test_a_notebook_is_valid_and_holds_no_output(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert cell.metadata.keys() <= {"lines_to_next_cell"}
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@each_notebook
def test_a_notebook_opens_in_colab(path):
    badge = read(path).cells[0].source
    address = "https://colab.research.google.com/github/"
    assert re.findall(rf"\]\(({address}[^)]*)\)", badge) == [
        f"{address}{SLUG}/blob/main/notebooks/{path.name}"
    ]
    # Whoever opens it has to be told what a placeholder is.
    assert SLUG != "OWNER/REPO" or "replace `OWNER/REPO`" in badge
    assert (
        f'ECHO_JAX = "echo-jax[export] @ git+https://github.com/{SLUG}"'
        in install_cell(path)
    )


def test_all_notebooks_begin_with_the_same_install_cell():
    assert len({install_cell(path) for path in NOTEBOOKS}) == 1
    assert 'TINY = os.environ.get("ECHO_JAX_TINY") == "1"' in install_cell(NOTEBOOKS[0])


def test_where_echo_jax_is_installed_the_install_cell_does_nothing(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail())
    exec(install_cell(NOTEBOOKS[0]), {})


def test_elsewhere_the_install_cell_installs_it_and_clones_nothing(monkeypatch):
    commands = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, check: commands.append(command)
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    wheel = "echo-jax[export] @ https://example.org/echo_jax-0.1.0-py3-none-any.whl"
    source = install_cell(NOTEBOOKS[0])
    source = source.replace(f"echo-jax[export] @ git+https://github.com/{SLUG}", wheel)
    # An older NumPy that is imported already would stay.
    with pytest.raises(SystemExit, match="Restart the session"):
        exec(source, {})
    monkeypatch.delitem(sys.modules, "numpy")
    exec(source, {})
    assert commands == [[sys.executable, "-m", "pip", "install", "--quiet", wheel]] * 2


def test_a_placeholder_is_never_installed(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    source = install_cell(NOTEBOOKS[0]).replace(SLUG, "OWNER/REPO")
    with pytest.raises(SystemExit, match="Set ECHO_JAX"):
        exec(source, {})


def results_of(monkeypatch, folder, **environment):
    """Runs the cell that finds the published runs, and returns where they are."""
    monkeypatch.chdir(folder)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (cell,) = (each for each in read(NOTEBOOKS[2]).cells if "RESULTS = " in each.source)
    found: dict = {"os": os}
    exec(cell.source, found)
    return os.fspath(found["RESULTS"])


def test_results_are_read_from_a_checkout_a_folder_or_a_bucket(tmp_path, monkeypatch):
    assert results_of(monkeypatch, FOLDER) == str(ROOT / "results")
    assert results_of(monkeypatch, ROOT) == str(ROOT / "results")
    with pytest.raises(SystemExit, match="Set RESULTS"):
        results_of(monkeypatch, tmp_path)
    for place in (str(tmp_path), "gs://bucket/results"):
        assert results_of(monkeypatch, tmp_path, ECHO_JAX_RESULTS=place) == place


@pytest.mark.slow
@each_notebook
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
        len(re.findall(r"plt\.show\(\)|display\(Image", cell.source))
        for cell in notebook.cells
        if cell.cell_type == "code"
    )
    assert len(figures) == shows > 0
