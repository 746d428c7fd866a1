"""Two processes that train one run."""

import contextlib
import random
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.faults.campaign import Bench, CannotBeginError
from benchmarks.faults.processes import Ended, killed, started, wait
from benchmarks.faults.runs import Recipe, Whole, source_of


class Pair:
    """Both processes of a run; what is left of them is killed at the end.

    Args:
      bench: Has the data.
      recipe: Of the run.
      folder: That both write.
      more: Other fields of the config of the second one.

    Attributes:
      processes: The two.
    """

    def __init__(
        self,
        bench: Bench,
        recipe: Recipe,
        folder: Path,
        *,
        more: Mapping[str, Any] | None = None,
    ):
        port = _free_port()
        self._logs = [folder.with_name(f"{folder.name}-{n}.log") for n in range(2)]
        self.processes = []
        for number, log in enumerate(self._logs):
            fields = {
                "mesh__data": -1,
                "distributed__coordinator": f"localhost:{port}",
                "distributed__num_processes": 2,
                "distributed__process_id": number,
                **(more or {} if number else {}),
            }
            argv = recipe.argv(source_of(bench), folder, **fields)
            self.processes.append(started(argv, log))

    def wait(self, limit_s: float) -> list[Ended]:
        """Waits for both; see `processes.wait`."""
        pairs = zip(self.processes, self._logs, strict=True)
        return [wait(process, log, limit_s) for process, log in pairs]

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            killed(process)


def _free_port() -> int:
    # Free until it is bound, seconds later: connections are given higher ones.
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("localhost", port)):
            return port


def made_by_pair(bench: Bench, recipe: Recipe, folder: Path) -> Whole:
    """Trains a run in two processes, twice; see `runs.made_by`."""
    for name in ("compiled", "whole"):
        begin = time.monotonic()
        with Pair(bench, recipe, folder / name) as pair:
            for ended in pair.wait(300.0):
                if ended.status:
                    raise CannotBeginError(ended.output)
    return Whole(folder / "whole", 0, time.monotonic() - begin)
