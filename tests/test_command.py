"""The command `echo-jax` before anything of the package is there, and its end."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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


def run(code, *argv):
    command = [sys.executable, "-c", code, *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_ctrl_c_while_python_imports_ends_it_in_one_line():
    done = run(INTERRUPTED, "report", "a folder")
    assert (done.returncode, done.stdout) == (130, "")
    first, second = done.stderr.splitlines()
    assert first == "echo-jax report: interrupted; run the same command to resume"
    assert second == "  echo-jax report 'a folder'"


def test_a_command_that_ends_at_once_leaves_the_terminal_a_cursor_and_a_line():
    primary, terminal = pty.openpty()
    code = "from echo_jax.terminal import ending; ending.end(3, 'ends')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=terminal, stderr=subprocess.PIPE
    )
    os.close(terminal)
    assert (done.returncode, done.stderr) == (3, b": ends\n")
    assert os.read(primary, 99) == b"\r\x1b[2K\x1b[?25h"
    os.close(primary)


@pytest.mark.parametrize(("call", "status"), [("_exit(75)", 75), ("getpid()", -6)])
def test_a_process_that_native_code_aborts_has_its_say(call, status):
    code = f"""
import ctypes, os, threading
from echo_jax.terminal import ending
ending.before_abort(lambda: (os.write(1, b"said"), os.{call}))
aborting = threading.Thread(target=ctypes.CDLL(None).abort)
aborting.start()
aborting.join()
"""
    done = run(code)
    assert (done.returncode, done.stdout) == (status, "said")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says who is being started")
def test_a_worker_that_is_being_started_says_nothing_of_the_end(tmp_path):
    code = """
import multiprocessing, os, sys, threading, time
from echo_jax.terminal import ending
class Calls:
    def __init__(self, *call):
        self.call = call
    def __reduce__(self):
        return self.call
def end():
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    ending.end(3)
threading.Thread(target=end).start()
read = Calls(os.mkdir, (sys.argv[1],)), Calls(time.sleep, (0.5,)), bytes(1 << 20)
multiprocessing.get_context("spawn").Process(target=print, args=read).start()
"""
    done = run(code, str(tmp_path / "is_reading"))
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


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
    with ending.EndsAtOnce(["echo-jax", "train"]):
        thread = threading.Thread(target=tell)
        thread.start()
        thread.join()
    print(signal.SIGNUM in signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)
with ending.EndsAtOnce(["echo-jax", "train"]):
    os.kill(os.getpid(), signal.SIGNUM)
    threading.Event().wait()
"""
    done = run(code.replace("SIGNUM", signum))
    assert done.returncode == status
    assert done.stdout.split() == 2 * ["True", "False"]
    first, second = done.stderr.splitlines()
    assert first.startswith(f"echo-jax train: interrupted by {signum}")
    assert second == "  echo-jax train"
