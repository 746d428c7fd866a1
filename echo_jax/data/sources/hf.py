"""Hugging Face datasets by index, from a dataset's name or a local folder.

Images stay encoded until the workload decodes them. No code of a dataset is run: the
package reads Arrow and Parquet, and its own JSON.
"""

import importlib
import os
import urllib.parse
from pathlib import Path
from typing import Any

from echo_jax.data.sources.shard_files import find_shards, shards_metadata
from echo_jax.data.sources.source import Opened, open_foreign
from echo_jax.files.folders import typed_path

# The columns of each kind, and the feature that identifies each column.
_COLUMNS = {"images": ("image", "label"), "text": ("text",)}
_OPTIONS = ("config", "image", "label", "text")


class HuggingFaceData:
    """A dataset with a column of images and one of classes, or one of text.

    Columns are found by their features (``Image``, ``ClassLabel``, ``string``) if each
    is unique, or named in the source: ``hf:NAME?image=photo&label=fine_label``.
    """

    def __init__(self, name: str, kind: str):
        """Opens a folder, or a name in the cache; options follow a ``?``."""
        self._source, self._kind = f"hf:{name}", kind
        path, _, query = name.partition("?")
        options = dict(urllib.parse.parse_qsl(query))
        if unknown := options.keys() - set(_OPTIONS):
            raise ValueError(
                f"data.source={self._source!r} sets {min(unknown)}; what may follow "
                f"the ? is {', '.join(_OPTIONS)}."
            )
        self._splits = _opened(self._source, path, options.get("config"))
        self.splits = list(self._splits)
        features = next(iter(self._splits.values())).features
        self._columns = {
            column: self._column(features, column, options.get(column))
            for column in _COLUMNS[kind]
        }

    def _column(self, features: Any, wanted: str, named: str | None) -> str:
        fitting = [name for name, what in features.items() if _fits(what, wanted)]
        if named is None and len(fitting) == 1:
            return fitting[0]
        if (name := named or wanted) in fitting:
            return name
        what = {"image": "Image", "label": "ClassLabel", "text": "text"}[wanted]
        raise ValueError(
            f"data.source={self._source!r} has {', '.join(fitting) or 'no column'} of "
            f"feature {what}"
            + (f", and none called {named!r}" if named else "")
            + f", among {', '.join(features)}; name one as in hf:NAME?{wanted}=COLUMN, "
            "or give it the feature with cast_column."
        )

    def open(self, split: str) -> Opened:
        """Returns the records of a split, and their decoder."""
        data = self._splits[split]
        facts = {
            "source": self._source,
            "split": split,
            "columns": dict(self._columns),
            **shards_metadata([Path(file["filename"]) for file in data.cache_files]),
        }
        data = data.with_format(None).select_columns([*self._columns.values()])
        about = {}
        if self._kind == "images":
            about["classes"] = data.features[self._columns["label"]].names
            image = self._columns["image"]
            data = data.cast_column(image, _datasets().Image(decode=False))
        return open_foreign(
            _Rows(data, self._columns),
            self._kind,
            splits={name: {"examples": len(s)} for name, s in self._splits.items()},
            facts=facts,
            **about,
        )


class _Rows:
    def __init__(self, data: Any, columns: dict[str, str]):
        self._data, self._columns = data, columns

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        row = self._data[index]
        if "text" in self._columns:
            return {"text": (row[self._columns["text"]] or "").encode()}
        image = row[self._columns["image"]]
        if not image or image["bytes"] is None:
            raise ValueError(
                f"row {index} has no bytes of an image, but {image!r:.80}; read the "
                "folder that dataset.save_to_disk makes: it puts the bytes there."
            )
        return {
            "image": image["bytes"],
            "label": row[self._columns["label"]],
            "name": image["path"] or str(index),
        }


def _datasets() -> Any:
    # A run uses local data only and fails at once without it. The package reads this
    # variable at its import; 0 allows downloads from the hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        # Import by name, because type checkers may lack the package.
        return importlib.import_module("datasets")
    except ImportError as error:
        raise ValueError(
            "data.source=hf:… is read with the package datasets, which is not "
            "installed: pip install 'echo-jax[hf]'."
        ) from error


def _fits(feature: Any, wanted: str) -> bool:
    datasets = _datasets()
    if wanted == "image":
        return isinstance(feature, datasets.Image)
    if wanted == "label":
        return isinstance(feature, datasets.ClassLabel)
    return getattr(feature, "dtype", None) in ("string", "large_string") and isinstance(
        feature, datasets.Value
    )


def _opened(source: str, path: str, config: str | None) -> dict[str, Any]:
    folder, datasets = typed_path(path), _datasets()
    datasets.disable_progress_bars()
    try:
        if not folder.is_dir():
            found = datasets.load_dataset(path, config)
        elif any((folder / name).is_file() for name in _OF_SAVE_TO_DISK):
            found = datasets.load_from_disk(str(folder))
        else:
            shards = find_shards(source, path, ".parquet")
            files = {split: list(map(str, paths)) for split, paths in shards.items()}
            found = datasets.load_dataset("parquet", data_files=files)
    except Exception as error:  # Many packages raise here: files, Arrow, the hub.
        if isinstance(error, ValueError) and source in str(error):
            raise
        said = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"data.source={source!r} cannot be opened ({said}); name a folder of "
            "save_to_disk or of Parquet files, or a dataset that "
            "datasets.load_dataset has put into the cache before."
        ) from error
    finally:
        datasets.enable_progress_bars()
    if isinstance(found, datasets.Dataset):
        return {str(found.split or "train"): found}
    return {str(split): data for split, data in found.items()}


# `save_to_disk` writes these files for several splits, and for one.
_OF_SAVE_TO_DISK = ("dataset_dict.json", "state.json")
