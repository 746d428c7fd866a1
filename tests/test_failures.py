"""What fails, is slow or is stopped is said in a line; tracebacks with --debug."""

import errno
import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console

from echo_jax import cli, runs
from echo_jax.terminal import Notes

ROOT = Path(__file__).parents[1]
LM = f"{ROOT}/configs/lm.py:tiny"
QUICKSTART = f"{ROOT}/configs/quickstart.py:tiny"
FULL = os.strerror(errno.ENOSPC)
DEAD = "Worker process was terminated unexpectedly with exit code {}. Search"


@pytest.fixture
def fail(monkeypatch, tmp_path, capfd):
    """Runs a training that fails; returns the exit status and what it says."""

    def run(error, *flags):
        def raise_it(*args, **options):
            raise error

        monkeypatch.setattr(runs, "run_train", raise_it)
        argv = ["train", "--config", LM, "--workdir", str(tmp_path), *flags]
        status = cli.main(argv)
        return status, capfd.readouterr().err

    return run


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (
            OSError(errno.ENOSPC, FULL, "/r/a.jsonl"),
            1,
            ["/r/a.jsonl: No space ", "; free some space"],
        ),
        (
            PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/r/x"),
            2,
            ["/r/x: Permission denied; change the permissions, or name another"],
        ),
        (
            ValueError(
                'RESOURCE_EXHAUSTED: Error writing "a/0" in database at local file '
                '"/r/checkpoints/8.orbax-checkpoint-tmp/state/": Failed writing: '
                f'"/r/checkpoints/8.orbax-checkpoint-tmp/state/d/0d27": {FULL}'
            ),
            1,
            ["/r/checkpoints/8.orbax", "No space left on device; free", "goes on"],
        ),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nof 9 GB"),
            1,
            ["RESOURCE_EXHAUSTED: Out of memory; lower --config.batch_size"],
        ),
        (RuntimeError(DEAD.format(-11)), 1, ["was killed; if mem", "goes on"]),
        (
            jax.errors.JaxRuntimeError(
                "UNKNOWN: Gloo all-reduce failed: reset by peer"
            ),
            1,
            ["reset by peer; another process of the run, or the way to it, is lost; "],
        ),
        (RuntimeError(DEAD.format(-7)), 1, ["/dev/shm, is full; ", "--shm-size=8g"]),
        (OSError(errno.ENOSPC, FULL, "/psm_1a2b"), 1, ["/dev/shm, is full; lower --"]),
        (
            RuntimeError("open() failed: Too many open files; opening /r/a"),
            1,
            ["Too many open files; opening /r/a; raise the limit by 'ulimit -n 65536'"],
        ),
        (MemoryError(), 1, ["MemoryError; lower --config.batch_size"]),
        (KeyError("a\x1b[2J\nb"), 1, ["unexpected KeyError: ", "bug", "--debug"]),
        (BrokenPipeError(), 1, ["unexpected BrokenPipeError; this may be a bug"]),
    ],
)
def test_what_fails_is_said_in_a_line(fail, error, status, said):
    found, err = fail(error)
    (line,) = err.splitlines()
    assert found == status
    assert line.startswith("echo-jax train: ")
    assert all(words in line for words in said)
    assert "\x1b" not in err


# Each is asked for by a command that starts jax elsewhere than the others.
PLATFORMS = f"""
import jax
from echo_jax import cli
for platforms, command in [
    ("cuda", "study --config {QUICKSTART} --workdir x"),
    ("cuda", "report examples --config {LM} --workdir x"),
    ("nonsense,cpu", "probe --config {LM}"),
]:
    jax.config.update("jax_platforms", platforms)
    print(cli.main(command.split()))
"""


def python(folder, *argv):
    command = [sys.executable, *argv]
    return subprocess.run(command, cwd=folder, text=True, capture_output=True)


def test_devices_that_are_not_here_are_said_in_a_line(tmp_path):
    done = python(tmp_path, "-c", PLATFORMS)
    assert done.stdout.split("\n")[-4:-1] == ["2"] * 3, done.stderr
    said = [line for line in done.stderr.splitlines() if "%" not in line]
    fix = "; unset JAX_PLATFORMS, or set JAX_PLATFORMS=cpu to run on the CPUs"
    assert all(fix in line for line in said)
    *cuda, nonsense = said
    assert all("JAX_PLATFORMS=cuda asks for devices that are" in line for line in cuda)
    assert "Backend 'nonsense' is not in the list of known backends" in nonsense
    assert not any(tmp_path.iterdir())


def test_a_failure_ends_the_process_with_its_threads(fail, monkeypatch):
    """Threads of a save that failed fail again while Python ends, and say so."""
    ends = []
    monkeypatch.setattr("echo_jax.terminal.ending.end", ends.append)
    monkeypatch.setattr(sys, "argv", ["echo-jax"])
    error = OSError(errno.ENOSPC, FULL, "/r/metrics.jsonl")
    fail(error)
    assert not ends  # A program that calls the command goes on.
    main = cli.main
    monkeypatch.setattr(cli, "main", lambda argv: sys.argv.extend(argv) or main())
    fail(error)
    assert ends == [1]


def test_debug_shows_the_traceback_and_the_same_status(fail):
    status, err = fail(runs.ConfigRefusedError("no, because"), "--debug")
    assert status == 2
    first, *_, last = err.splitlines()
    assert first.startswith("Traceback")
    assert last == "echo-jax train: no, because"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["train", "--config", LM, "--workdir", ""], "'' is no folder; give a path"),
        (["probe", "--config", LM, "--json", ""], "--json: '' is not a path; name one"),
        (["probe", "--config", LM, "--json", "."], "--json=. is a folder; name a file"),
        (["prepare", "text", "a.txt", "--out", ""], "--out: '' is not a path"),
        (["train", "--config", "\x1b]0;t\x07\n[red]\u202e.py", "--workdir", "x"], "t"),
    ],
)
def test_a_path_that_names_nothing_is_said_in_a_line(argv, said, capsys):
    try:
        status = cli.main(argv)
    except SystemExit as end:
        status = end.code
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2
    assert said in line and line.isprintable()


def test_a_line_has_no_character_that_steers_a_terminal():
    found = io.StringIO()
    Notes(Console(file=found)).note("größe — 日本 [red] \x1b\r\n\x85\u2028\udcff")
    wanted = r"größe — 日本 [red] \x1b\r\n\x85\u2028\udcff"
    assert found.getvalue()[10:] == f"{wanted}\n"


def test_what_takes_long_is_said_again_and_again(monkeypatch):
    found, paused = io.StringIO(), []

    class Soon(threading.Event):
        def wait(self, timeout=None):
            paused.append(timeout)
            return len(paused) > 7

    fake = SimpleNamespace(Event=Soon, Thread=threading.Thread)
    monkeypatch.setattr("echo_jax.terminal.notes.threading", fake)
    with Notes(Console(file=found)).slow("compiling"):
        pass
    said = [line[10:] for line in found.getvalue().splitlines()]
    assert said == [f"compiling ... {s} s" for s in (3, 8, 18, 38, 78, 138, 198)]


# A signal in the middle of the imports of the package.
INTERRUPTED = """
import os, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
import echo_jax_command
sys.exit(echo_jax_command.main())
"""


def test_ctrl_c_while_python_imports_ends_it_in_one_line():
    done = python(ROOT, "-c", INTERRUPTED, "report", "a folder")
    assert (done.returncode, done.stdout) == (130, "")
    first, second = done.stderr.splitlines()
    assert first == "echo-jax report: interrupted; run the same command to resume"
    assert second == "  echo-jax report 'a folder'"


@pytest.mark.parametrize(("signum", "status"), [("SIGINT", 130), ("SIGUSR1", 138)])
def test_a_signal_is_blocked_in_the_processes_of_a_command_and_ends_the_command(
    signum, status
):
    code = """
import multiprocessing, os, signal, threading
from echo_jax.terminal import ending
signal.signal(signal.SIGHUP, signal.SIG_DFL)
def tell():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        blocked = pool.apply(signal.pthread_sigmask, (signal.SIG_BLOCK, ()))
        print(signal.SIGHUP in blocked and signal.SIGNUM in blocked, flush=True)
for _ in range(2):
    with ending.owning_process(["echo-jax", "train"]):
        thread = threading.Thread(target=tell)
        thread.start()
        thread.join()
    print(signal.SIGNUM in signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)
with ending.owning_process(["echo-jax", "train"]):
    os.kill(os.getpid(), signal.SIGNUM)
    threading.Event().wait()
"""
    done = python(ROOT, "-c", code.replace("SIGNUM", signum))
    assert done.returncode == status
    assert done.stdout.split() == 2 * ["True", "False"]
    first, second = done.stderr.splitlines()
    assert first.startswith(f"echo-jax train: interrupted by {signum}")
    assert second == "  echo-jax train"


def test_a_first_signal_is_heard_and_a_second_one_ends_a_command_at_once():
    code = """
import os, signal, threading
from echo_jax.terminal import ending
heard = threading.Event()
with ending.owning_process(["echo-jax", "train", "--x"]):
    with ending.StopSignals(lambda signum: heard.set()) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        print(heard.wait(60), signals.received, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()
"""
    done = python(ROOT, "-c", code)
    assert (done.returncode, done.stdout) == (143, "True 15\n")
    first, second = done.stderr.splitlines()
    assert "train: ended at once by a second signal, SIGTERM, without saving" in first
    assert second == "  echo-jax train --x"
