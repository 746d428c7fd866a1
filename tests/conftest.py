"""One CPU backend with 8 devices for all tests; set before it starts."""

import contextlib
import functools
import gc
import os
import signal
import sys
import zlib
from importlib import metadata

# Virtual CPU devices that wait for each other need threads: with fewer than twice
# as many threads as devices, collectives can hang.
os.environ["NPROC"] = "16"
os.environ["JAX_PLATFORMS"] = "cpu"
# XLA of jaxlib 0.10 has two generators of code for CPUs, and the earlier one compiles
# in two thirds of the time. Newer versions have the later one alone: with them the gate
# tries that, on a newer Python, and optimizes none of it.
if metadata.version("jaxlib").startswith("0.10."):
    own = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"--xla_cpu_use_fusion_emitters=false {own}"
else:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import jax
import pytest
from absl import flags
from hypothesis import HealthCheck, settings

from echo_jax.data.sources import shapes
from echo_jax.training import measure

# A shell has Ctrl-C ignored by what it runs in the background, and by all that this
# starts: tests of Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Otherwise each of the processes that tests start compiles what all of them import.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Grain's worker processes read absl flags; there is no absl.app.run in a test.
flags.FLAGS.mark_as_parsed()

# Grain's shuffle is a pure function, which takes half a millisecond an item where there
# are few items. Without this, as where Grain keeps it elsewhere, tests take longer.
with contextlib.suppress(ImportError):
    from grain._src.python.experimental.index_shuffle.python import index_shuffle_module

    index_shuffle_module.index_shuffle = functools.lru_cache(2**20)(
        index_shuffle_module.index_shuffle
    )

# So are the shapes, of which every workload of shapes draws two thousand to validate
# with, for half a second.
shapes._encoded = functools.lru_cache(2**14)(shapes._encoded)


def _none_optimized():
    return "JAX_DISABLE_MOST_OPTIMIZATIONS" in os.environ


def _optimize_nothing():
    """Halves the time of compilations: machine code is not optimized, and runs slower.

    XLA's own passes are run as always. Processes that tests start do the same.
    """
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)


# How fast a run is is no test's subject: two seconds, or twenty steps, are for users.
measure.BUDGET_S = 0.05

# An example may take as long as the machine is busy.
settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")


def pytest_configure(config):
    """Lets all processes of all test runs share the programs that they compile.

    Half of the time of the tests would go into compiling the same ones. There is a
    bound on the size, because with one jax takes a lock: nothing half-written is read.
    """
    # Slow tests train for longer, and run the programs that users run.
    if not config.option.markexpr.startswith("slow"):
        _optimize_nothing()
    if not config.pluginmanager.hasplugin("cacheprovider"):
        return
    shared = {
        "jax_compilation_cache_dir": str(config.cache.mkdir("compiled")),
        "jax_compilation_cache_max_size": 2**30,
        "jax_persistent_cache_min_compile_time_secs": 0.1,
    }
    for name, value in shared.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    # Before it writes one, jax reads when each of the hundreds was used. It is enough
    # that processes which tests start do so.
    with contextlib.suppress(ImportError):
        from jax._src.lru_cache import LRUCache

        LRUCache._evict_if_needed = lambda self, **_: None


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One more than there are cores: tests wait for processes, locks and devices."""
    return (yield) + 1


def _freeze():
    """Exempts all that there is from collections of garbage.

    Commands and laws make full ones, which take a second each where all libraries have
    been imported and the programs of hundreds of tests are kept.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    _freeze()


@pytest.fixture(autouse=True, scope="module")
def _frozen_after_each_file():
    yield
    _freeze()


@pytest.fixture(autouse=True, scope="module")
def _strict_types(request):
    """Promotes no types in trainings, as no ranks."""
    is_strict = request.path.parent.name in ("training", "workloads", "models")
    name = "jax_numpy_dtype_promotion"
    jax.config.update(name, "strict" if is_strict else "standard")


@functools.cache
def _shared_soon():
    """A cache of its own, so that no other test runs what was not optimized."""
    from echo_jax.training import compiled

    return functools.lru_cache(maxsize=8)(compiled._Programs)


def _compiled_soon():
    if _none_optimized():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("echo_jax.training.compiled._share", _shared_soon())
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def compiled_soon():
    """Programs, those of processes too, are compiled in half the time, and run slower.

    Machine code is not optimized; XLA's own passes are run as always.
    """
    yield from _compiled_soon()


@pytest.fixture(scope="module")
def all_compiled_soon():
    """As `compiled_soon`, for all tests of a file and the fixtures that they share."""
    yield from _compiled_soon()


@pytest.fixture
def inflated(monkeypatch):
    """Gives a list of how many bytes each call of zlib has decompressed."""
    sizes = []
    real = zlib.decompressobj

    class Watched:
        def __init__(self):
            self._stream = real()

        def __getattr__(self, name):
            return getattr(self._stream, name)

        def decompress(self, *args):
            content = self._stream.decompress(*args)
            sizes.append(len(content))
            return content

    monkeypatch.setattr(zlib, "decompressobj", Watched)
    return sizes


# The files that take longest, in either suite, start first: processes that share the
# tests file by file then end together. What stands here changes no result.
LONGEST = """
launch_search training_distributed notebooks workload_lm workload_training cli loaders
folders echo_laws training_device tfdata export training_resume
model_commands trained_run data_tfdata_pipeline training_local training_loop networks
data_pipeline workload_coco
"""


def pytest_collection_modifyitems(items):
    rank = {f"test_{name}": at for at, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
