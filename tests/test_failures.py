"""What fails is said in one line, with the fix; tracebacks come with --debug alone."""

import errno
import functools
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest

from echo_jax import cli, runs
from echo_jax.config import default_config
from echo_jax.config.check import check_config
from echo_jax.terminal import ending
from echo_jax.terminal.failures import quiet_libraries
from echo_jax.terminal.printable import printable

LM = f"{Path(__file__).parents[1]}/configs/lm.py:tiny"
QUICKSTART = f"{Path(__file__).parents[1]}/configs/quickstart.py:tiny"
FULL = os.strerror(errno.ENOSPC)
COMMANDS = ["train", "study", "probe", "report", "prepare images", "prepare coco"]
COMMANDS += ["prepare text", "prepare verify"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_can_show_the_traceback(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    assert "--debug" in capsys.readouterr().out


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
        (OSError(errno.ENOSPC, FULL, "/r/metrics.jsonl"), 1, ["metrics.jsonl cannot"]),
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
            RuntimeError(
                f"write() failed: {FULL}; writing /r/t.arrayrecord; at byte 2"
            ),
            1,
            ["/r/t.arrayrecord cannot be written"],
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
        (
            RuntimeError(
                "Worker process was terminated unexpectedly with exit code -11. Search"
            ),
            1,
            ["worker that reads the data was killed by SIGSEGV; if memory", "goes on"],
        ),
        (
            RuntimeError(
                "Worker process was terminated unexpectedly with exit code 3. Search"
            ),
            1,
            ["worker that reads the data ended with exit status 3; the same command"],
        ),
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
    ("cuda", "probe --config {LM}"),
    ("cuda", "report examples --config {LM} --workdir x"),
    ("tpu", "probe --config {LM}"),
    ("nonsense,cpu", "probe --config {LM}"),
]:
    jax.config.update("jax_platforms", platforms)
    print(cli.main(command.split()))
"""


def test_devices_that_are_not_here_are_said_in_a_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PLATFORMS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split("\n")[-7:-1] == ["2"] * 6, done.stderr
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
    command = ["study", "--config", QUICKSTART, "--workdir", "x"]
    done = subprocess.run(
        [sys.executable, "-m", "echo_jax", *command],
        cwd=tmp_path,
        env={**os.environ, variable or "UNUSED": "bad"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
    assert not (tmp_path / "x").exists()


def test_a_full_disk_says_how_much_is_free(fail, tmp_path):
    _, err = fail(OSError(errno.ENOSPC, FULL, str(tmp_path / "not" / "there.json")))
    assert f"there.json cannot be written: {FULL} (" in err
    assert " MB are free there); free some, and the same command goes on" in err


def test_a_failure_ends_the_process_with_its_threads(fail, monkeypatch):
    """Threads of a save that failed fail again while Python ends, and say so."""
    ends = []
    monkeypatch.setattr(ending, "end", ends.append)
    monkeypatch.setattr(sys, "argv", ["echo-jax"])
    run = functools.partial(fail, OSError(errno.ENOSPC, FULL, "/r/metrics.jsonl"))
    run()
    assert not ends  # A program that calls the command goes on.
    main = cli.main
    monkeypatch.setattr(cli, "main", lambda argv: sys.argv.extend(argv) or main())
    run()
    assert ends == [1]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_printing_to_a_full_disk_is_said_in_a_line(monkeypatch):
    code = """
import os, sys
from echo_jax import cli
from echo_jax.terminal import failures
failures._is_output_full = lambda: True  # /dev/full is no file.
sys.argv[1:] = ["configs"]
sys.exit(cli.main())
"""
    with open("/dev/full", "w") as full:
        monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"echo-jax configs: the file of standard output cannot be written: {FULL}"
    )


def test_what_we_say_ourselves_is_not_unexpected(monkeypatch, capfd, tmp_path):
    config = default_config()
    config.batch_size = 0
    monkeypatch.setattr(runs, "run_train", lambda *a, **options: check_config(config))
    argv = ["train", "--config", LM, "--workdir", str(tmp_path)]
    assert cli.main(argv) == 1
    assert capfd.readouterr().err == (
        "echo-jax train: config.batch_size=0 must be at least 1; set "
        "--config.batch_size=1\n"
    )


def test_debug_shows_the_traceback_and_the_same_status(fail):
    status, err = fail(runs.ConfigRefusedError("no, because"), "--debug")
    assert status == 2
    first, *_, last = err.splitlines()
    assert first.startswith("Traceback")
    assert last == "echo-jax train: no, because"


def test_what_threads_of_libraries_print_is_kept_back(capfd):
    def fail():
        raise ValueError("in a thread")

    def noise():
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        try:
            fail()
        except ValueError:
            logging.getLogger("absl").exception("logged")

    with quiet_libraries():
        noise()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["train", "--config", LM, "--workdir", ""], "'' is no folder; give a path"),
        (["report", ".", "--workdir", ""], "'' is no folder; give a path"),
        (
            ["probe", "--config", LM, "--json", ""],
            "--json: '' is not a path; name one",
        ),
        (["probe", "--config", LM, "--json", "."], "--json=. is a folder; name a file"),
        (
            ["prepare", "text", "a.txt", "--out", ""],
            "--out: '' is not a path",
        ),
        (["prepare", "verify", ""], "'' is not a path; name one"),
    ],
)
def test_an_empty_path_is_no_folder(argv, said, capsys):
    try:
        status = cli.main(argv)
    except SystemExit as end:
        status = end.code
    (line,) = capsys.readouterr().err.splitlines()
    assert status == 2
    assert said in line


def test_no_name_steers_the_terminal(tmp_path, capsys):
    name = f"{tmp_path}/\x1b]0;title\x07\n[red][/]\u202e.py"
    assert cli.main(["train", "--config", name, "--workdir", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()


def test_printable_text_stays_as_it_is():
    assert printable("runs/größe — 日本 [red]") == "runs/größe — 日本 [red]"
    assert printable("\x1b\r\n\x85\u2028\udcff") == r"\x1b\r\n\x85\u2028\udcff"
