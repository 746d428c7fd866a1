"""The import directions of docs/architecture.md, enforced.

The source is parsed, so an import inside a function counts like any other: none
can hide a cycle or a forbidden direction.
"""

import ast
import graphlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "echo_jax"

# What each package, or each module beside them, may import from the project: a
# package's name stands for all of its modules. A module that may do something else than
# its package has a line of its own.
ALLOWED = {
    "__init__": "echo inference.run",
    "__main__": "cli",
    "cli": "cli config data.images.decode data.plain_text data.prepare "
    "data.sources.prepared files.folders inference runs searches studies terminal",
    "config": "config data.pipeline.spec data.pipeline.storage echo files "
    "studies.fields",
    "data": "data echo files",
    "echo": "echo",
    "files": "files terminal.notes terminal.printable",
    "lazy": "",
    "inference": "config data.prepare files inference studies.page training workloads",
    "models": "models",
    "runs": "config files inference.examples "
    "searches.making searches.trials searches.workers terminal.notes training "
    "variants workloads",
    "searches": "config files searches studies terminal training workloads",
    "studies": "echo.instrument.rates files studies terminal.printable",
    "terminal": "terminal",
    "training": "config data.pipeline.shard echo files "
    "models.batch_norm terminal training workloads.base",
    "variants": "config files terminal.notes training workloads",
    "workloads": "config data echo models workloads",
}

# What may be imported from outside, beside the standard library. Packages that
# are not named here choose for themselves.
ALLOWED_OUTSIDE = {
    "__init__": "",
    "__main__": "",
    "cli": "etils numpy rich",
    "config": "etils ml_collections",
    "config.optimizer": "jax optax",
    "echo": "numpy",
    "files": "etils",
    "files.folders": "etils fsspec gcsfs google",
    "files.lock": "etils filelock tensorstore",
    "lazy": "",
    "models": "flax jax numpy",
    "searches": "etils jax matplotlib numpy rich scipy",
    "studies": "etils matplotlib numpy rich",
    "terminal": "rich",
}

# The modules of `echo` whose name begins so know one backend, and never another.
BACKENDS = {
    "echo.adapters.grain": "grain",
    "echo.adapters.tfdata": "tensorflow",
    "echo.device": "jax",
    "echo.processes": "jax",
    "echo.laws.devices": "jax",
    "echo.stores.device": "jax",
}


def _modules() -> dict[str, Path]:
    """Maps the name of every module, without ``echo_jax.``, to its file."""
    names = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        names[".".join(parts)] = path
    return names


MODULES = _modules()


def _imported(tree: ast.AST) -> set[str]:
    """The full names of all modules that a syntax tree imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            # `from package import module` imports the module.
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {n for n in inside if n.removeprefix("echo_jax.") in MODULES}
            names |= modules or {node.module}
    return names


def _in_project(names: set[str]) -> set[str]:
    """The names that lie in the project, without ``echo_jax.``."""
    inside = {name for name in names if name.split(".")[0] == "echo_jax"}
    return {name.removeprefix("echo_jax.") for name in inside}


def _outside(names: set[str]) -> set[str]:
    """The top packages that come neither from the project nor with Python."""
    tops = {name.split(".")[0] for name in names}
    return tops - sys.stdlib_module_names - {"echo_jax"}


IMPORTS = {
    name: _imported(ast.parse(path.read_text(encoding="utf-8")))
    for name, path in MODULES.items()
}


def _is_allowed(imported: str, allowed: set[str]) -> bool:
    return any(imported == a or imported.startswith(f"{a}.") for a in allowed)


def _line_of(module: str, table: dict[str, str]) -> set[str] | None:
    line = table.get(module, table.get(module.split(".")[0]))
    return None if line is None else {*line.split()}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_layer_may(module):
    allowed = _line_of(module, ALLOWED)
    assert allowed is not None, f"{module} is new: give it a line in ALLOWED"
    inside = _in_project(IMPORTS[module]) - {"lazy"}
    assert not {n for n in inside if not _is_allowed(n, allowed)}
    outside = _line_of(module, ALLOWED_OUTSIDE)
    if outside is not None:
        backend = {BACKENDS[name] for name in BACKENDS if module.startswith(name)}
        assert not _outside(IMPORTS[module]) - outside - backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_of_echo_knows_no_other(backend):
    own = BACKENDS[backend]
    others = tuple(name for name, library in BACKENDS.items() if library != own)
    for module in (m for m in MODULES if m.startswith(backend)):
        assert not any(n.startswith(others) for n in _in_project(IMPORTS[module]))


def test_a_config_dict_ends_at_the_door():
    """Behind it a config is a `RunSpec`, which a workload sees."""
    door = {f"config.{name}" for name in ("defaults", "saved", "study")}
    assert {n for n, names in IMPORTS.items() if "ml_collections" in names} == door


def test_there_is_no_cycle():
    graph = {name: _in_project(names) - {"echo_jax"} for name, names in IMPORTS.items()}
    # Raises CycleError, which names the cycle.
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) >= set(graph)


def test_training_names_no_workload():
    names = {m.split(".")[1] for m in MODULES if m.startswith("workloads.")} - {"base"}
    assert names, "the workloads have moved; look for them there"
    for module in (m for m in MODULES if m.split(".")[0] == "training"):
        tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
        strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        assert not strings & names, module


# What an import must not bring, nor those before it.
LIGHT = {
    "echo_jax.files.folders": "fsspec gcsfs google jax",
    "echo_jax.config": "flax grain jax tensorflow",
    "echo_jax.cli": "flax grain jax matplotlib tensorflow",
    "echo_jax.runs": "matplotlib scipy.stats tensorflow",
}
EXTRAS = (
    *("datasets", "flatbuffers", "gcsfs", "google.cloud", "pyarrow", "pycocotools"),
    *("safetensors", "tensorboard", "tensorboardX", "tensorflow", "torch", "wandb"),
)
PUBLIC = (
    "echo_jax",
    *(f"echo_jax.{name}" for name in ("config", "data.prepare", "inference.run")),
    *(f"echo_jax.{name}" for name in ("models", "training", "workloads")),
)
IMPORTS_IN_TURN = """
import importlib, inspect, json, pydoc, sys, typing
from importlib.machinery import PathFinder
light, extras, public = map(json.loads, sys.argv[1:])
found = []
for name, absent in light.items():
    importlib.import_module(name)
    found += [f"{name} imports {each}" for each in {*absent} & {*sys.modules}]
# jax, Orbax and tensorflow-datasets import these where they are.
heavy = {*extras} - {"flatbuffers", "google.cloud", "pyarrow"}
found += [f"an extra, {each}, is imported" for each in heavy & {*sys.modules}]

class NotInstalled(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        is_there = not any(f"{name}.".startswith(f"{each}.") for each in extras)
        return super().find_spec(name, path, target) if is_there else None

sys.meta_path = [NotInstalled if f is PathFinder else f for f in sys.meta_path]

def look(module):
    pydoc.render_doc(module)
    exec(f"from {module.__name__} import *", {})
    members = [m for n, m in inspect.getmembers(module) if n in module.__all__]
    for member in members:
        if inspect.isclass(member) or inspect.isroutine(member):
            typing.get_type_hints(member)
    return members

for name in public:
    for member in look(importlib.import_module(name)):
        if inspect.ismodule(member) and name == "echo_jax":
            look(member)
ej = sys.modules["echo_jax"]
for use in (
    lambda: ej.tfdata.echo(ej.EchoSpec(2)),
    lambda: importlib.import_module("echo_jax.data.pipeline.tfdata_engine"),
):
    try:
        use()
    except ImportError as error:
        print(error)
print(json.dumps(found))
"""


def test_imports_are_light_and_need_no_extra():
    """All in one process, as each takes seconds to start."""
    light = {name: absent.split() for name, absent in LIGHT.items()}
    arguments = map(json.dumps, (light, EXTRAS, PUBLIC))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORTS_IN_TURN, *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *said, found = done.stdout.splitlines()
    assert ["pip install 'echo-jax[tfdata]'" in line for line in said] == [True] * 2
    assert json.loads(found) == []


@pytest.mark.slow
def test_reports_and_workers_are_imported_without_jax():
    program = """import sys
import echo_jax.studies.table, echo_jax.searches.table, echo_jax.searches.workers
print(*sys.modules)"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    absent = {"jax", "flax", "tensorflow", "grain"}
    assert not set(done.stdout.split()) & absent
