"""The start of a run: writes its files, and restores the folder if it fails."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Self

from echo_jax.config import Config
from echo_jax.config.applies import CHANGING
from echo_jax.files.folders import RunPath
from echo_jax.files.json_files import read_json
from echo_jax.training.processes.distributed import is_main_process
from echo_jax.training.records.environment import claim_workdir
from echo_jax.training.records.loggers import LOGGERS
from echo_jax.training.saving.model import MODEL_FILE, TASK_FILE

# They end with the run, unless the config sets their end.
_DECAYING = ("linear", "cosine", "slow_start", "onecycle", "warmup_stable_decay")


class TakenBack:
    """Restores the files of a folder if its block fails, unless `keep` was called."""

    # Files in `replaced` get their old content back. Files and folders in `added` are
    # removed if they are new.
    def __init__(
        self, folder: RunPath, replaced: Sequence[str], added: Sequence[str] = ()
    ):
        files = [folder / name for name in replaced]
        self._contents = {file: _content(file) for file in files}
        new = (folder / name for name in added)
        self._contents |= {file: None for file in new if not file.exists()}
        self._is_kept = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None or self._is_kept:
            return
        # The user sees the error that ended the start, not one of this clean-up.
        with contextlib.suppress(OSError):
            for file, content in self._contents.items():
                if content is None and file.is_dir():
                    file.remove()
                elif content is None:
                    file.root.joinpath(*file.parts).unlink(missing_ok=True)
                elif _content(file) != content:
                    file.write(content)

    def keep(self) -> None:
        """Keeps the written files, because later work depends on them."""
        self._is_kept = True


# A refused start, such as one with a full disk, must not block the corrected command.
# A run that is to be extended must stay as it was.
class Start(TakenBack):
    """Claims a run folder, and restores it if no update and no save follows.

    Attributes:
      bent: A note for a resumed run whose new number of updates moves its learning
        rates or synchronisations; ``""`` without one, and in all but the first process.
    """

    def __init__(
        self, workdir: RunPath, config: Config, task_files: Iterable[str] = ()
    ):
        self.bent = ""
        if not is_main_process():
            super().__init__(workdir, ())
            return
        if old := read_json(workdir / "config.json", {"updates": int}):
            self.bent = _bent(old["updates"], config)
        made = ("metrics.jsonl", "checkpoints", MODEL_FILE, TASK_FILE)
        added = (*made, *LOGGERS, *task_files)
        super().__init__(workdir, ("config.json", "environment.json"), added)
        try:
            claim_workdir(workdir, config)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise


def _bent(before: int, config: Config) -> str:
    optim, local, updates = config.optim, config.local.schedule, config.updates
    if before == updates:
        return ""
    moved = []
    if optim.schedule in _DECAYING and not (optim.decay_updates or optim.boundaries):
        moved.append(
            f"the {optim.schedule} schedule decays to the end of the run, so from here "
            f"on the learning rate is that of a run of {updates} updates; a run that "
            "is begun with --config.optim.decay_updates=N keeps its learning rates"
        )
    if local in CHANGING:
        moved.append(
            "replicas meet by a schedule that ends with the run, so from here "
            f"on as often as in one of {updates} updates"
        )
    elif local != "none":
        moved.append(
            f"replicas met at the end of the run, after update {before}; one that is "
            f"begun with {updates} updates may not meet there"
        )
    said = "; and ".join(moved)
    return said and f"config.updates was {before} and is {updates}: {said}"


def _content(file: RunPath) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
