"""A cloud in a folder, for the tests of launch_tpu.sh; see stand_in.py."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ["launch_tpu.sh", "launch_worker.sh"]
STAND_IN = Path(__file__).with_name("stand_in.py")
TRAIN = ["--config", "configs/lm.py:tiny", "--workdir", "/mnt/shared/lm"]
LONG_S = 300  # What takes longer hangs, however busy the machine is.
NASTY = [
    *("--config.xla.preset=overlap", '--config.xla.options={"xla_gpu_name": true}'),
    *("two  words ", "it's", '"double"', "$HOME `id` $(id)", "back\\slash\\"),
    *("line\nbreak\n", "tab\tand\rreturn", "", "*", "~", "#no;comment&|<>(){}[]!?"),
    *("--x=a b", "-n", "=ls", "größe ☃", "%s %USER%", "{a,b}"),
]


class Cloud:
    """A cloud in a folder, and a checkout to launch from."""

    def __init__(self, folder: Path):
        self.world = folder / "world"
        self.checkout = folder / "checkout"
        self.home = folder / "home"

    def build(self) -> None:
        for path in (self.world, self.checkout, self.home):
            path.mkdir()
        for name in (*SCRIPTS, "pyproject.toml"):
            shutil.copy(ROOT / name, self.checkout)
        shutil.copytree(ROOT / "configs", self.checkout / "configs")
        for place, names in {
            "bin": ("gcloud", "python3", "echo-jax"),
            "worker_bin": ("gcloud", "uv", "echo-jax"),
        }.items():
            (self.world / place).mkdir()
            for name in names:
                prefix = "stand_in_" * (place == "worker_bin" and name != "gcloud")
                self.write(
                    f"{place}/{prefix}{name}",
                    f"#!{sys.executable} -IS\nimport sys\n"
                    f"sys.path.insert(0, {str(STAND_IN.parent)!r})\n"
                    f"import stand_in\nstand_in.main({name!r})\n",
                )
            # Waiting is shorter here.
            shorter = "[ $1 = 0.2 ] && exec /bin/sleep 0.05\nexec /bin/sleep 0.2\n"
            self.write(f"{place}/sleep", f"#!/bin/sh\n{shorter}")
        self.write("worker_bin/hostname", "#!/bin/sh\necho w-$WORKER\n")
        # The installer of uv.
        self.write(
            "worker_bin/curl",
            "#!/bin/sh\necho 'mkdir $UV_UNMANAGED_INSTALL'\n"
            "echo 'cp $WORLD/worker_bin/stand_in_uv $UV_UNMANAGED_INSTALL/uv'\n",
        )

    def write(self, path: str, script: str) -> None:
        (self.world / path).write_text(script)
        (self.world / path).chmod(0o755)

    def environment(self, **variables: str) -> dict[str, str]:
        path = f"{self.world}/bin:/usr/bin:/bin"
        usual = {"HOME": str(self.home), "PATH": path, "WORLD": str(self.world)}
        return {**usual, **variables}

    def launch(self, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
        with self.launched(*argv, **variables) as process:
            output, errors = process.communicate(timeout=LONG_S)
        return subprocess.CompletedProcess(argv, process.returncode, output, errors)

    @contextlib.contextmanager
    def launched(self, *argv: str, **variables: str) -> Iterator[subprocess.Popen]:
        with subprocess.Popen(
            [f"{self.checkout}/launch_tpu.sh", *argv],
            cwd=self.home,
            env=self.environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # As a terminal does: Ctrl-C goes to all in it.
            process_group=0,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def plan(self, **lists: list[str]) -> None:
        (self.world / "plan.json").write_text(json.dumps(lists))

    def rows(self, name: str) -> list:
        path = self.world / f"{name}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [*map(json.loads, text.splitlines())]

    def calls(self) -> list[list[str]]:
        """What gcloud was called with since the last time."""
        calls = self.rows("gcloud")
        (self.world / "gcloud.jsonl").unlink(missing_ok=True)
        return calls

    def verbs(self) -> list[str]:
        """Those calls in short: the verb, of ssh what is done."""
        return [in_short(call) for call in self.calls()]

    def there(self, worker: int, path: str = "") -> Path:
        return self.world / "vm" / str(worker) / "echo-jax" / path

    def states(self) -> list[str]:
        done = self.launch("status")
        assert done.returncode == 0, done.stderr
        self.calls()
        return [line.partition(" w-")[2] for line in done.stdout.splitlines()[1:]]

    def ended(self, number: int = 2) -> list[str]:
        """Waits until so many workers have an exit code; returns all states."""
        until(lambda: len(list(self.there(0).parents[1].glob(EXIT_CODES))) >= number)
        return self.states()

    def end_all(self) -> None:
        """Ends what still runs on a worker or in `local`."""
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                variables = environment.read_bytes().split(b"\0")
                if f"WORLD={self.world}".encode() in variables:
                    os.kill(int(environment.parent.name), signal.SIGKILL)


def in_short(call: list[str]) -> str:
    verb = next(word for word in call if not word.startswith("-") and word in SHORT)
    if verb != "ssh":
        return verb
    command = next(word for word in call if word.startswith("--command="))
    for what in ("state", "installed", "install", "start", "stop"):
        if f"launch_worker.sh {what}" in command or f"echo-jax/{what} " in command:
            return what
    raise AssertionError(command)


EXIT_CODES = "*/echo-jax/run/exit_code"
SHORT = {"create", "delete", "start", "describe", "ssh", "scp"}


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def started(cloud: Cloud, number: int) -> list:
    until(lambda: len(cloud.rows("train")) >= number)
    return cloud.rows("train")


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
