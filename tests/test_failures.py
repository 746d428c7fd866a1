"""What fails or is slow is said in a line, with the fix; tracebacks with --debug."""

import errno
import io
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from rich.console import Console

from echo_jax import cli, runs
from echo_jax.config import check_config, default_config
from echo_jax.terminal import Notes, pauses, say_while_slow

LM = f"{Path(__file__).parents[1]}/configs/lm.py:tiny"
QUICKSTART = f"{Path(__file__).parents[1]}/configs/quickstart.py:tiny"
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
        (OSError(errno.ENOSPC, FULL, "/r/a.jsonl"), 1, ["a.jsonl cannot", " free th"]),
        (PermissionError(errno.EACCES, "Denied", "/r/x"), 2, ["/r/x: Denied; change"]),
        (
            ValueError(
                'RESOURCE_EXHAUSTED: Error writing "a/0" in database at local file '
                '"/r/checkpoints/8.orbax-checkpoint-tmp/state/": Failed writing: '
                f'"/r/checkpoints/8.orbax-checkpoint-tmp/state/d/0d27": {FULL}'
            ),
            1,
            ["/r/checkpoints/8 cannot be written", "the same command goes on"],
        ),
        (
            RuntimeError(f"open() failed: {FULL}; opening out/t.arrayrecord; Failed"),
            1,
            ["train: out/t.arrayrecord cannot be written"],
        ),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nof 9 GB"),
            1,
            ["the devices failed: RES", "Out of memory; ", "lower --config.batch_size"],
        ),
        (RuntimeError(DEAD.format(-11)), 1, ["killed by SIGSEGV; if mem", "goes on"]),
        (RuntimeError(DEAD.format(3)), 1, ["ended with exit status 3; the same comm"]),
        (MemoryError(), 1, ["memory of this machine", "--config.echo.buffer"]),
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
    ("cuda", "train --config {LM} --workdir x"),
    ("cuda", "study --config {QUICKSTART} --workdir x"),
    ("cuda", "report examples --config {LM} --workdir x"),
    ("tpu", "probe --config {LM}"),
    ("nonsense,cpu", "probe --config {LM}"),
]:
    jax.config.update("jax_platforms", platforms)
    print(cli.main(command.split()))
"""


def python(folder, *argv, **options):
    command = [sys.executable, *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(command, cwd=folder, text=True, **pipes)


def test_devices_that_are_not_here_are_said_in_a_line(tmp_path):
    done = python(tmp_path, "-c", PLATFORMS)
    assert done.stdout.split("\n")[-6:-1] == ["2"] * 5, done.stderr
    said = [line for line in done.stderr.splitlines() if "%" not in line]
    fix = "; unset JAX_PLATFORMS, or set JAX_PLATFORMS=cpu to run on the CPUs"
    assert all("jax finds no devices: " in line and fix in line for line in said)
    *cuda, tpu, nonsense = said
    assert all("JAX_PLATFORMS=cuda asks for devices that are" in line for line in cuda)
    assert "Unable to initialize backend 'tpu': " in tpu
    assert "Backend 'nonsense' is not in the list of known backends" in nonsense
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variable", "where", "said"),
    [
        ("JAX_ENABLE_X64", "", "jax cannot be imported: invalid truth value 'bad'"),
        ("", "matplotlibrc", "matplotlib, which draws the figures, cannot be imported"),
    ],
)
def test_what_cannot_be_imported_is_refused_before_a_study(
    variable, where, said, tmp_path
):
    if where:
        (tmp_path / where).write_bytes(b"\xff")
    command = ["-m", "echo_jax", "study", "--config", QUICKSTART, "--workdir", "x"]
    done = python(tmp_path, *command, env={**os.environ, variable or "UNUSED": "bad"})
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
    assert not (tmp_path / "x").exists()


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


def test_what_we_say_ourselves_is_not_unexpected(monkeypatch, fail, tmp_path):
    config = default_config()
    config.batch_size = 0
    with pytest.raises(ValueError) as caught:
        check_config(config)
    status, said = fail(caught.value)
    assert (status, said.count("\n")) == (1, 1)
    assert said.startswith(
        "echo-jax train: config.batch_size=0 must be at least 1; set"
    )


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
        (["report", ".", "--workdir", ""], "'' is no folder; give a path"),
        (["probe", "--config", LM, "--json", ""], "--json: '' is not a path; name one"),
        (["probe", "--config", LM, "--json", "."], "--json=. is a folder; name a file"),
        (["prepare", "text", "a.txt", "--out", ""], "--out: '' is not a path"),
        (["prepare", "verify", ""], "'' is not a path; name one"),
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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("runs/größe — 日本 [red]", "runs/größe — 日本 [red]"),
        ("\x1b\r\n\x85\u2028\udcff", r"\x1b\r\n\x85\u2028\udcff"),
    ],
)
def test_printable_text_stays_as_it_is(text, shown):
    found = io.StringIO()
    Notes(Console(file=found)).note(text)
    assert found.getvalue()[10:] == f"{shown}\n"


class Clock:
    """Lets time pass where something is waited for; it is done at the end."""

    def __init__(self, done_s):
        self.now_s, self._done_s = 0.0, done_s
        self.said = []

    def wait(self, seconds):
        self.now_s = min(self.now_s + seconds, self._done_s)
        return self.now_s == self._done_s

    def say(self, text):
        self.said.append((self.now_s, text))


def test_nothing_is_said_where_nobody_reads_on():
    said = []

    def say(text):
        said.append(text)
        raise BrokenPipeError

    say_while_slow("compiling", say, lambda seconds: False)
    assert said == ["compiling ..."]


def test_what_takes_long_is_said_again_and_again_and_what_does_not_is_not():
    quick, slow = Clock(2.9), Clock(100.0)
    for clock in (quick, slow):
        say_while_slow("compiling", clock.say, clock.wait)
    assert quick.said == []
    later = [(s, f"compiling ... {s} s") for s in (8, 18, 38, 78)]
    assert slow.said == [(3, "compiling ..."), *later]


@pytest.mark.parametrize("silent_s", [0.0, 1.5, 2.9, 50.0])
def test_nobody_is_silent_for_longer_because_two_things_are_slow(silent_s):
    first, second, *later = itertools.islice(pauses(silent_s), 12)
    assert 1 <= first <= 3 and (silent_s + first <= 4 or first == 1)
    assert second == 5
    assert all(a <= b <= 2 * a for a, b in itertools.pairwise([second, *later]))
    assert later[-1] == 60
