"""Sources whose folders are splits: ``train/`` and ``val/``, perhaps in one more."""

from collections.abc import Callable, Mapping, Sequence

from echo_jax.data.prepare.entries import Files

__all__ = ["first_difference", "folders_of", "several_splits", "split_folders"]

_SPLITS = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}


def split_folders(
    files: Files, is_wanted: Callable[[str], bool], *, of_classes: bool
) -> tuple[dict[str, str], bool]:
    """Returns the folder of each split, and whether the source holds only these."""
    every = [folders_of(e.name) for e in files.entries if is_wanted(e.name)]
    depth = first_difference(every)
    paths = sorted({of[: depth + 1] for of in every})
    named = {
        _SPLITS[path[depth].lower()]: path
        for path in paths
        if len(path) > depth and path[depth].lower() in _SPLITS
    }
    train = named.get("train")
    is_plain = not of_classes or all(
        len(of) > depth + 1 for of in every if of[: depth + 1] == train
    )
    is_layout = train is not None and 1 < len(named) == len(paths) and is_plain
    in_order = [split for split in dict.fromkeys(_SPLITS.values()) if split in named]
    return {split: "/".join(named[split]) for split in in_order}, is_layout


def several_splits(path: str, folders: Mapping[str, str]) -> str:
    """Returns the error message for a source with these folders of splits."""
    example = " ".join(f"{split}={path}/{name}" for split, name in folders.items())
    return (
        f"{path!r} holds folders of several splits; name those that you want one by "
        f"one, as in {example}"
    )


def folders_of(name: str) -> tuple[str, ...]:
    """Returns the folders of a file, the outermost first."""
    return tuple(name.split("/")[:-1])


def first_difference(folders: Sequence[tuple[str, ...]]) -> int:
    """Returns the depth of the outermost folder that differs."""
    within = [of for of in folders if of]
    last = min(map(len, within), default=1) - 1
    differing = (n for n in range(last) if len({of[n] for of in within}) > 1)
    return next(differing, last)
