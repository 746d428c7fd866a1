"""The environment of a run, and checks that a run folder belongs to a config."""

import contextlib
import functools
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from etils import epath
from flax.traverse_util import flatten_dict

from echo_jax.config.run import RunSpec
from echo_jax.files.json_files import plain, read_if_whole, read_json, write_json
from echo_jax.files.lock import FolderLock
from echo_jax.training.processes.distributed import (
    all_gather,
    is_main_process,
    wait_for_all,
)
from echo_jax.training.saving.hashes import sha256_of

_PACKAGES = ("echo-jax", "flax", "grain", "jax", "jaxlib", "numpy", "optax")
_PACKAGES += ("orbax-checkpoint",)

# A resumed run may take longer, report more often, or have another target.
_MAY_CHANGE = {
    "updates",
    "target",
    "stop_at_target",
    "log_every",
    "eval_every",
    "checkpoint_every",
    "probe_repeats",
}

# Fields that do not change a run's results: where it runs, how it is shown, what
# ends it.
_NO_PART = {"distributed", "log", "profile"}
_NO_PART_OF_DATA = {"timeout_s", "check_finite"}


def describe_environment(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of ``environment.json``: versions, devices, commit, data."""
    # The cores that the run may use; macOS does not tell.
    has_affinity = hasattr(os, "sched_getaffinity")
    cpu_count = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
    return {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "processes": jax.process_count(),
        "cpu_count": cpu_count,
        "commit": code_commit(),
        "workload": dict(metadata),
    }


@contextlib.contextmanager
def lock_workdir(
    workdir: epath.Path, config: RunSpec, metadata: Mapping[str, Any]
) -> Iterator[FolderLock]:
    """Locks and checks a run folder in the first process; the others wait for it."""
    with FolderLock(*[workdir] if is_main_process() else []) as lock:
        wait_for_all("lock_workdir")
        # Only now can no other run write into it.
        if is_main_process():
            check_workdir(workdir, config, metadata)
        yield lock


def check_shared(workdir: epath.Path) -> None:
    """Raises if a process does not see the folder that the first one has claimed."""
    # The others look for the folder after the first process has made it.
    all_gather(None)
    seen = all_gather((workdir / "config.json").exists())
    if not all(seen):
        raise ValueError(
            f"process {seen.index(False)} of {len(seen)} does not see {workdir}; give "
            "all of them one --workdir, on a disk that they share or gs://BUCKET/FOLDER"
        )


def claim_workdir(workdir: epath.Path, config: RunSpec) -> None:
    """Makes a run folder, and writes ``config.json`` into it."""
    new = _own_fields(config)
    if new != read_json(workdir / "config.json"):
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(workdir / "config.json", new)


def check_workdir(
    workdir: epath.Path, config: RunSpec, metadata: Mapping[str, Any] | None = None
) -> None:
    """Raises if the folder holds a run of another config; its data may have moved."""
    old = read_json(workdir / "config.json", {})
    if old is None or not _has_saved(workdir):
        return
    before = flatten_dict(old, sep=".")
    before.pop("data.hold_batch", None)  # Such a run saved nothing.
    after = flatten_dict(_own_fields(config), sep=".")
    differing = [
        f"{name} ({before.get(name)!r} -> {after.get(name)!r})"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
        and name not in _MAY_CHANGE
        and not (name == "data.source" and _has_moved(workdir, metadata or {}))
    ]
    if differing:
        raise ValueError(
            f"{workdir} holds a run of another config; it differs in "
            f"{', '.join(differing)}; resume with the old values, or use another "
            "--workdir"
        )


def _has_saved(workdir: epath.Path) -> bool:
    checkpoints = workdir / "checkpoints"
    return checkpoints.is_dir() and any(
        each.name.isdigit() for each in checkpoints.iterdir()
    )


def check_replicas(workdir: epath.Path, replicas: int) -> None:
    """Raises if the run was begun with another number of replicas (devices)."""
    before = (read_json(workdir / "environment.json") or {}).get("replicas", replicas)
    if before != replicas and _has_saved(workdir):
        raise ValueError(
            f"{workdir} holds a run of {before} replicas, one on each device of "
            f"config.mesh, which has {replicas} now; resume it on {before} devices, or "
            "use another --workdir"
        )


def _has_moved(workdir: epath.Path, metadata: Mapping[str, Any]) -> bool:
    """Returns whether this is the data of the folder's run, by its hashes."""
    known = (read_if_whole(workdir / "environment.json") or {}).get("workload")
    return any(_hashes(metadata)) and is_same_data(known, metadata)


def is_same_data(known: Any, metadata: Mapping[str, Any]) -> bool:
    """Returns whether two descriptions are of the same data, by hashes or by place."""
    now = json.loads(json.dumps(plain(metadata)))
    if any(_hashes(metadata)):
        known, now = _without_place(known), _without_place(now)
    return known == now


def _without_place(metadata: Any) -> Any:
    if not isinstance(metadata, Mapping):
        return metadata
    facts = {k: v for k, v in metadata.items() if k not in ("source", "left_out")}
    return {name: _without_place(fact) for name, fact in facts.items()}


def identity(config: RunSpec, metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns hashes of the config and the data, equal for a resumed run."""
    fixed = {k: v for k, v in _own_fields(config).items() if k not in _MAY_CHANGE}
    if hashes := [*_hashes(metadata)]:  # Data with a hash may move to another place.
        fixed["data"].pop("source", None)
    return {"config_sha256": sha256_of(fixed), "data_sha256": sha256_of(hashes)}


def check_saved(
    config: RunSpec, metadata: Mapping[str, Any], update: int, host: Mapping[str, Any]
) -> None:
    """Raises if a checkpoint is from another config or other data."""
    if update > config.updates:
        raise ValueError(
            f"this run has done {update} updates, more than config.updates="
            f"{config.updates}; set --config.updates={update} or more, or use another "
            "--workdir"
        )
    now = identity(config, metadata)
    if host["data_sha256"] != now["data_sha256"]:
        raise ValueError(
            f"the checkpoint of update {update} was trained on other data than those "
            f"that config.data.source={config.data.source!r} holds now; put the old "
            "ones back, or use another --workdir"
        )
    if host["config_sha256"] != now["config_sha256"]:
        raise ValueError(
            f"the checkpoint of update {update} was saved with another config than "
            "config.json; use another --workdir"
        )


def _hashes(metadata: Mapping[str, Any]) -> Iterator[str]:
    for name, value in sorted(metadata.items()):
        if isinstance(value, Mapping):
            yield from _hashes(value)
        elif name in ("sha256", "fingerprint"):
            yield value


def _own_fields(config: RunSpec) -> dict[str, Any]:
    """Returns the fields that do not depend on where a run runs, as read from JSON."""
    own = {k: v for k, v in config.to_dict().items() if k not in _NO_PART}
    own["data"] = {k: v for k, v in own["data"].items() if k not in _NO_PART_OF_DATA}
    return json.loads(json.dumps(own))


# Cached, because the runs of a search call both of these hundreds of times.
@functools.cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def code_commit() -> str | None:
    """Returns the package's git commit, ``-dirty`` if changed; None if unknown."""
    file = Path(__file__)

    def git(*args: str) -> str:
        command = ["git", "-C", str(file.parent), *args]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        # An installed copy inside somebody else's checkout is not that checkout.
        git("ls-files", "--error-unmatch", file.name)
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None
