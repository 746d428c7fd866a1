"""Runs notebooks and stores their outputs, for the site and for readers.

    pip install -e '.[notebooks]'
    python docs/site/run_notebooks.py          # all of them, in some minutes
    python docs/site/run_notebooks.py 02 03    # those whose names begin so

After an edit of text `jupytext --sync notebooks/*.py` is enough: it keeps outputs.
After one of code a test asks for this command.
"""

import argparse
import ast
import base64
import hashlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

import jupytext.cli
import nbformat
from nbclient import NotebookClient
from PIL import Image

_FOLDER = Path(__file__).parents[2] / "notebooks"
# The key of the hash of the code that made the outputs, in a notebook's metadata.
_CODE = "outputs_of_code"
_MOST_BYTES = 400_000
# A figure with so few colours takes a fifth of its bytes.
_COLOURS = 128
# With two names or more, so that "/s" and "</td>" are none.
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<])/[\w.-]+/[\w.-]+|\b[A-Z]:\\\w")


def main(argv: list[str] | None = None) -> None:
    """Runs notebooks, and stores their outputs in the files.

    Raises:
      SystemExit: Outputs of a notebook may not be stored; its file has none then.
      nbclient.exceptions.CellExecutionError: A cell failed.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="beginnings of names (default: all)")
    names = tuple(parser.parse_args(argv).names or [""])
    os.environ.pop("ECHO_JAX_TINY", None)
    for script in sorted(_FOLDER.glob("*.py")):
        if not script.name.startswith(names):
            continue
        jupytext.cli.jupytext(["--quiet", "--sync", str(script)])
        path = script.with_suffix(".ipynb")
        notebook = nbformat.read(path, as_version=4)
        metadata = {**notebook.metadata, _CODE: _hash_of_code(notebook)}
        # Times of cells and the version of Python differ from one run to the next.
        NotebookClient(
            notebook,
            timeout=None,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(_FOLDER)}},
        ).execute()
        notebook.metadata = nbformat.from_dict(metadata)
        for output in _outputs(notebook.cells):
            if png := output.get("data", {}).get("image/png"):
                output.data["image/png"] = _smaller(png)
        if wrong := what_is_wrong(notebook):
            raise SystemExit(f"{path.name} is not stored: {'; '.join(wrong)}.")
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


def what_is_wrong(notebook: nbformat.NotebookNode) -> list[str]:
    """Says what of a notebook's outputs is missing, or may not be stored."""
    wrong = []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, start=1):
        kinds = {each.get("name", each.output_type) for each in cell.outputs}
        pictures = sum("image/png" in each.get("data", {}) for each in cell.outputs)
        texts = "\n".join(_texts(cell))
        found = {
            "was not run in its turn": cell.execution_count != number,
            "shows nothing": _speaks(cell.source) and not cell.outputs,
            "lacks pictures": pictures != num_pictures(cell.source),
            "shows an error": "error" in kinds,
            "writes to standard error": "stderr" in kinds,
            "shows a path of a machine": _ABSOLUTE_PATH.search(texts),
            "writes for a terminal": "\x1b" in texts or "\r" in texts,
        }
        wrong += [
            f"code cell {number} {what}" for what, is_so in found.items() if is_so
        ]
    if notebook.metadata.get(_CODE) != _hash_of_code(notebook):
        wrong.append("its code has changed since it was run")
    size = len(nbformat.writes(notebook).encode())
    if size > _MOST_BYTES:
        wrong.append(f"{size:,} bytes are more than {_MOST_BYTES:,}")
    return wrong


def num_pictures(source: str) -> int:
    """Returns how many pictures a cell shows."""
    return len(re.findall(r"plt\.show\(\)|display\(Image", source))


def _hash_of_code(notebook: nbformat.NotebookNode) -> str:
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def _speaks(source: str) -> bool:
    """Returns whether a cell prints or displays, other than in functions it defines."""
    found = list(ast.parse(source).body)
    while found:
        node = found.pop()
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "print",
            "display",
        ):
            return True
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            found += ast.iter_child_nodes(node)
    return False


def _outputs(cells: list[nbformat.NotebookNode]) -> Iterator[nbformat.NotebookNode]:
    for cell in cells:
        yield from cell.get("outputs", ())


def _texts(cell: nbformat.NotebookNode) -> Iterator[str]:
    """Yields all that a cell shows, but its pictures."""
    for output in _outputs([cell]):
        yield output.get("text", "")
        for kind, data in output.get("data", {}).items():
            if kind != "image/png":
                yield str(data)


def _smaller(png: str) -> str:
    """Returns a picture, in base64, with few colours."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    found = io.BytesIO()
    few = image.quantize(_COLOURS, dither=Image.Dither.NONE)
    few.save(found, "PNG", optimize=True)
    return base64.b64encode(found.getvalue()).decode()


if __name__ == "__main__":
    main()
