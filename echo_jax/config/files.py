"""Config files: the search for one by name, its execution, and a copy to change.

The configs come with the package. In its wheel they are in the folder ``configs`` of
the package, and in a checkout beside the package.
"""

import contextlib
import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from etils import epath

from echo_jax.files.folders import FolderError, run_folder, typed_path, write

_PACKAGE = Path(__file__).parents[1]
# What a config file imports, or loads by name.
_NEEDED = re.compile(r'(?m)^(?:from|import) (\w+)|"([\w/]+)\.py[:"]')


def _folder() -> Path:
    """Returns the folder of the packaged configs."""
    in_wheel = _PACKAGE / "configs"
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent / "configs"


def packaged_configs() -> dict[str, Path]:
    """Returns the packaged configs' files by name, such as ``cifar``."""
    folder = _folder()
    files = {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for path in folder.rglob("*.py")
    }
    # Files in the folder itself come first.
    names = sorted(files, key=lambda name: ("/" in name, name))
    has = {name: files[name].read_text(encoding="utf-8") for name in names}
    return {name: files[name] for name in names if "\ndef get_config(" in has[name]}


def find_config(file: str) -> Path:
    """Returns the file of a path or of a packaged config; an existing path wins."""
    path = typed_path(file)
    if path.is_file():
        return path
    known = packaged_configs()
    if file in known:
        return known[file]
    # Also accept a path as in a checkout, and a name without its folder.
    last = {name.rpartition("/")[2]: name for name in known}
    if close := difflib.get_close_matches(path.stem, last, n=1):
        fix = f"did you mean {last[close[0]]!r}, which comes with echo-jax?"
    else:
        fix = f"give PATH.py, or one that comes with echo-jax: {', '.join(known)}"
    said = f"config {file!r} is not a file at {path.absolute()}"
    raise FileNotFoundError(f"{said}; {fix}")


def import_config(path: Path) -> ModuleType:
    """Runs a config file, which may import its neighbours, and returns the module."""
    path.open("rb").close()  # A read error is not a failure of the file.
    module = ModuleType(path.stem)
    module.__file__ = str(path.absolute())
    loader = SourceFileLoader(path.stem, module.__file__)
    with _importing_from(path.parent.resolve()), failures_of(path):
        loader.exec_module(module)
    if not callable(getattr(module, "get_config", None)):
        raise AttributeError(
            f"config {str(path)!r} defines no get_config(); add that function"
        )
    return module


@contextlib.contextmanager
def failures_of(path: Path) -> Iterator[None]:
    """Turns accidental errors of a config file into ValueErrors with its line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        # A config or this package raised it on purpose, with a sentence of its own.
        is_raised = (frames[-1].line or "").startswith("raise ")
        if isinstance(error, ValueError) and is_raised:
            raise
        # The name that importlib uses.
        name = str(path.absolute())
        lines = [frame.lineno for frame in frames if frame.filename == name]
        if isinstance(error, SyntaxError) and error.filename == name:
            lines.append(error.lineno)
        where = f", line {lines[-1]}" if lines else ""
        # ml_collections lists all fields.
        said = re.sub(r"(?s)Other fields present:.*?(Did you|$)", r"\1", str(error))
        said = f"{type(error).__name__}: {said.partition(chr(10))[0]}"
        raise ValueError(
            f"config {str(path)!r}{where}, fails: {said}; correct it there"
        ) from error


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Lets a config import modules from its folder, as a script can."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        # A config in another folder may import another module of the same name.
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).parent == folder:
                del sys.modules[name]


# A file that exists with the same content is kept. If a different file has the name,
# nothing is copied.
def copy_config(name: str, folder: str | os.PathLike[str]) -> list[epath.Path]:
    """Copies a packaged config and the files that it needs, the config first."""
    known = packaged_configs()
    if name not in known:
        raise ValueError(
            f"config {name!r} does not come with echo-jax; use one of "
            f"{', '.join(known)}"
        )
    target, root = run_folder(folder), _folder()
    files = {
        target / path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in _needed(known[name])
    }
    for copy, text in files.items():
        if copy.exists() and copy.read_text() != text:
            raise FolderError(f"{copy} is there, and is another file; remove it")
    for copy, text in files.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        write(copy, text)
    return [*files]


def _needed(config: Path) -> list[Path]:
    """Returns a packaged config and all files that it imports or loads by name."""
    needed = [config]
    for path in needed:
        for imported, loaded in _NEEDED.findall(path.read_text(encoding="utf-8")):
            folder = path.parent if imported else _folder()
            file = folder / f"{imported or loaded}.py"
            if file.is_file() and file not in needed:
                needed.append(file)
    return needed
