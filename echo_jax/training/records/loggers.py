"""Loggers beside a run's own files: TensorBoard, Weights & Biases."""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from etils import epath

from echo_jax.config.run import RunSpec
from echo_jax.files.folders import is_in_bucket
from echo_jax.training.processes.distributed import is_main_process


# Each takes the numbers, arrays and images (``uint8[N, height, width, 3]``) of a run by
# name, after ``update`` updates. A run that starts is resumed from 0.
class _TensorBoard:
    """Event files in ``WORKDIR/tensorboard``, written without TensorFlow."""

    def __init__(self, workdir: epath.Path, config: RunSpec, resumed_from: int):
        from tensorboardX import SummaryWriter

        folder = workdir / "tensorboard"
        # Logs after the checkpoint are made again, so the old ones are purged.
        # The suffix separates two files that start in the same second.
        self._writer = SummaryWriter(
            os.fspath(folder),
            purge_step=resumed_from + 1 if resumed_from else None,
            filename_suffix=f".{resumed_from:012}",
        )
        if not resumed_from:
            text = json.dumps(config.to_dict(), indent=1)
            self._writer.add_text("config", f"```\n{text}\n```")

    def scalars(self, update: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, update)

    def histograms(self, update: int, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            self._writer.add_histogram(name, array.astype(np.float32), update)

    def images(self, update: int, images: Mapping[str, np.ndarray]) -> None:
        for name, pixels in images.items():
            self._writer.add_images(name, pixels, update, dataformats="NHWC")

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases, online or offline, kept in ``WORKDIR/wandb``."""

    def __init__(self, workdir: epath.Path, config: RunSpec, resumed_from: int):
        import wandb

        (workdir / "wandb").mkdir(parents=True, exist_ok=True)
        where = os.path.abspath(workdir)
        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "echo_jax"),
            name=workdir.name,
            # The same command with the same folder continues the same run.
            id=hashlib.sha256(where.encode()).hexdigest()[:16],
            resume="allow",
            dir=where,
            config=config.to_dict(),
            settings=wandb.Settings(console="off", symlink=False),
        )
        self._run.define_metric("*", step_metric="updates")

    def scalars(self, update: int, values: Mapping[str, Any]) -> None:
        self._run.log({"updates": update, **values})

    def histograms(self, update: int, arrays: Mapping[str, np.ndarray]) -> None:
        numbers = {k: x.astype(np.float32).ravel().tolist() for k, x in arrays.items()}
        made = {name: self._wandb.Histogram(each) for name, each in numbers.items()}
        self.scalars(update, made)

    def images(self, update: int, images: Mapping[str, np.ndarray]) -> None:
        made = {name: [*map(self._wandb.Image, each)] for name, each in images.items()}
        self.scalars(update, made)

    def close(self) -> None:
        self._run.finish()


LOGGERS = {"tensorboard": _TensorBoard, "wandb": _Wandb}
"""What ``config.log.to`` may name: extras of these names install them, and folders of
these names in the run folder are what they write."""


def check_loggers(names: Sequence[str], workdir: epath.Path) -> None:
    """Raises if a logger is unknown or not ready, or the folder is in a bucket."""
    for name in names:
        if name not in LOGGERS:
            raise ValueError(
                f"config.log.to names {name!r}, which is unknown; use "
                f"{', '.join(sorted(LOGGERS))}, such as "
                "--config.log.to=\"('tensorboard',)\""
            )
        if is_in_bucket(workdir):
            raise ValueError(
                f"config.log.to={tuple(names)!r} writes into a folder on a disk, and "
                f"{workdir} is in a bucket; leave it out, and read metrics.jsonl there"
            )
        package = {"tensorboard": "tensorboardX"}.get(name, name)
        if find_spec(package) is None:
            raise ValueError(
                f"config.log.to={name!r} needs {package}: pip install "
                f"'echo-jax[{name}]'"
            )
    if "wandb" not in names or not is_main_process():
        return
    import wandb

    if wandb.setup().settings.mode != "online":
        return
    try:
        # Looks for a key, or asks for it on a terminal; the run's start verifies it.
        wandb.login(verify=False)
    except wandb.Error as error:
        raise ValueError(
            f"config.log.to='wandb' is not logged in ({error}); run 'wandb login', or "
            "set the environment variable WANDB_MODE=offline"
        ) from error


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a row of ``metrics.jsonl``, as ``KIND/NAME``."""
    kind = row["kind"]
    return {
        f"{kind}/{name.removeprefix(f'{kind}_')}": value
        for name, value in row.items()
        if name != "updates"
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    }
