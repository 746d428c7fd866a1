"""A cloud in a folder, for the tests of launch_tpu.sh; see stand_in.py."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch_tpu.sh"
STAND_IN = Path(__file__).with_name("stand_in.py")
TRAIN = ["--config", "configs/lm.py:tiny", "--workdir", "/mnt/shared/lm"]
LONG_S = 300  # What takes longer hangs, however busy the machine is.
NASTY = [
    *("--config.xla.preset=overlap", '--config.xla.options={"xla_gpu_name": true}'),
    *("two  words ", "it's", '"double"', "$HOME `id` $(id)", "back\\slash\\"),
    *("line\nbreak\n", "tab\tand\rreturn", "", "*", "~", "#no;comment&|<>(){}[]!?"),
    *("--x=a b", "-n", "=ls", "größe ☃", "%s %USER%", "{a,b}"),
]


def documented() -> list[list[str]]:
    """The words of every command in docs/clusters.md."""
    page = (ROOT / "docs/clusters.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"(?ms)^```sh\n(.*?)^```", page))
    lines = re.split(r"\n| && ", blocks.replace("\\\n", " ").strip())
    return [words for line in lines if (words := shlex.split(line))]


class Cloud:
    """A cloud with one VM of two workers."""

    def __init__(self, folder: Path):
        self.world = folder / "world"
        self.home = folder / "home"
        for path in (self.home, self.home / "checkout", self.homes(0), self.homes(1)):
            path.mkdir(parents=True)
        self.checkout = self.home / "checkout"
        names = "launch_tpu.sh configs echo_jax echo_jax_command.py pyproject.toml"
        for name in f"{names} README.md LICENSE".split():
            (self.checkout / name).symlink_to(ROOT / name)
        for folder, names in {
            "bin": ("gcloud", "echo-jax"),
            "worker_bin": ("gcloud", "uv", "echo-jax"),
        }.items():
            (self.world / folder).mkdir()
            for name in names:
                self.write(
                    f"{folder}/{name}",
                    f"#!{sys.executable} -IS\nimport sys\n"
                    f"sys.path.insert(0, {str(STAND_IN.parent)!r})\n"
                    f"import stand_in\nstand_in.main({name!r})\n",
                )
        # Waiting for a minute is shorter here.
        self.write("worker_bin/sleep", "#!/bin/sh\nexec /bin/sleep 0.1\n")
        self.write("worker_bin/hostname", "#!/bin/sh\necho w-$WORKER\n")
        # The installer of uv.
        self.write(
            "worker_bin/curl",
            "#!/bin/sh\necho 'mkdir $UV_UNMANAGED_INSTALL'\n"
            "echo 'cp $WORLD/worker_bin/uv $UV_UNMANAGED_INSTALL'\n",
        )

    def homes(self, worker: int) -> Path:
        return self.world / "homes" / str(worker)

    def write(self, path: str, script: str) -> None:
        (self.world / path).write_text(script)
        (self.world / path).chmod(0o755)

    def plan(self, words: str) -> None:
        (self.world / "plan").write_text(words)

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
            [self.checkout / "launch_tpu.sh", *argv],
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

    def rows(self, name: str) -> list:
        path = self.world / f"{name}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [*map(json.loads, text.splitlines())]

    def end_all(self) -> None:
        for row in self.rows("train"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(row["pid"], signal.SIGKILL)


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
