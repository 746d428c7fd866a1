"""F6: files of users, changed as a fuzzer does, at every parser that reads them."""

import gzip
import io
import json
import lzma
import random
import shutil
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.faults.campaign import Bench, CannotBeginError, Fault, Outcome
from benchmarks.faults.damage import mutate
from benchmarks.faults.files import write_images
from benchmarks.faults.parsed_files import (
    read_class_list,
    read_shard,
    read_tensors,
    some_class_list,
    some_parquet,
    some_shard,
    some_tensors,
    some_zip,
)
from benchmarks.faults.processes import isolated
from echo_jax.config import default_config

_LIMIT_S = 60.0
_LM = Path(__file__).parents[2] / "configs" / "lm.py"
_FED = Path(__file__).parents[2] / "results" / "fed" / "baseline"
_SEARCH = _FED.parents[1] / "s3"
_TEXT = b"It was a dark and stormy night; the rain fell in torrents.\n" * 20


def _images_of(source: str) -> None:
    from echo_jax.data.prepare import Settings, prepare_images

    out = Path(source).parent / "out"
    prepare_images([source], Settings(out=out, max_bad="50%", workers=1))


def _image(path: str) -> None:
    from echo_jax.data.images.decode import decode_image
    from echo_jax.data.prepare.examples import check_image

    data = Path(path).read_bytes()
    decode_image(data)
    check_image(data)


def _coco(path: str) -> None:
    from echo_jax.data.prepare import Settings, prepare_coco

    folder = Path(path).parent
    images = write_images(folder / "images", 2)
    out = Settings(out=folder / "out", max_bad="100%", workers=1)
    prepare_coco([f"{path}:{images}"], out)


def _text(path: str) -> None:
    from echo_jax.data.prepare import Settings, TextSettings, prepare_text

    settings = Settings(out=Path(path).parent / "out", max_bad="100%", workers=1)
    prepare_text([path], settings, TextSettings(tokenizer="bytes", block=16))


def _dataset(path: str) -> None:
    from echo_jax.data.sources.prepared import open_prepared, read_info, unpack

    folder = Path(path).parent
    for split in read_info(folder)["splits"]:
        records = open_prepared(folder, split)
        for index in range(min(len(records), 100)):
            unpack(records[index])


def _record(path: str) -> None:
    from echo_jax.data.detection.records import DecodeBoxes
    from echo_jax.data.sources.source import DecodeRecord

    data = Path(path).read_bytes()
    DecodeBoxes(size=8, max_boxes=4, decode_record=DecodeRecord("coco"))(data)


def _run_of(path: str) -> None:
    from echo_jax.studies.runs import read_runs
    from echo_jax.studies.table import terminal_table

    terminal_table(read_runs([Path(path).parent]))


def _study(path: str) -> None:
    from echo_jax.studies.runs import read_study
    from echo_jax.studies.table import terminal_table

    terminal_table(read_study(Path(path).parent))


def _search(path: str) -> None:
    from echo_jax.searches.comparison import read_search
    from echo_jax.searches.table import search_table

    search_table(read_search(Path(path).parent))


def _trials(path: str) -> None:
    folder = Path(path).parent / "search"
    shutil.copytree(_SEARCH, folder, dirs_exist_ok=True)
    shutil.copy(path, folder / "trials")
    _search(str(folder / "study.json"))


def _log(path: str) -> None:
    from echo_jax.echo.decision_log import DecisionLog

    DecisionLog.from_text(Path(path).read_bytes())


def _flags(path: str) -> None:
    from echo_jax.config.flags import load_with_flags
    from echo_jax.config.run import check_config

    words = Path(path).read_bytes().decode("utf-8", "replace").split("\n")
    config = load_with_flags(f"{_LM}:tiny", words)
    check_config(config)


def _tar(folder: Path, mode: str) -> bytes:
    source = write_images(folder / "images", 4)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as archive:
        archive.add(source, arcname="images")
    return data.getvalue()


def _encoded(suffix: str, folder: Path) -> bytes:
    import cv2
    import numpy as np

    pixels = np.random.default_rng(0).integers(0, 256, (24, 20, 3), np.uint8)
    return cv2.imencode(suffix, pixels)[1].tobytes()


def _annotations(folder: Path) -> bytes:
    images = [
        {
            "id": n,
            "file_name": f"{('ant', 'cat')[n]}/00{n}.jpg",
            "height": 12,
            "width": 10,
        }
        for n in range(2)
    ]
    boxes = [
        {
            "id": n,
            "image_id": n % 2,
            "category_id": 3,
            "bbox": [1, 2, 3.5, 4],
            "iscrowd": 0,
            "area": 14,
        }
        for n in range(4)
    ]
    categories = [{"id": 3, "name": "cat"}]
    return json.dumps(
        {"images": images, "annotations": boxes, "categories": categories}
    ).encode()


def _some_record(folder: Path) -> bytes:
    import numpy as np

    from echo_jax.data.sources.prepared import pack

    boxes = np.float32([[1, 2, 5, 6]])
    return pack(
        {
            "image": _encoded(".jpg", folder),
            "image_id": 5,
            "height": 24,
            "width": 20,
            "boxes": boxes.tobytes(),
            "labels": np.int32([1]).tobytes(),
            "crowd": np.uint8([0]).tobytes(),
            "area": np.float32([16]).tobytes(),
        }
    )


def _some_log(folder: Path) -> bytes:
    from echo_jax.echo.decision_log import DecisionLog

    return DecisionLog([True, False, True, True] * 20).to_text().encode()


def _published(name: str, folder: Path) -> bytes:
    """Without a checksum, as a stranger may write it: what is wrong in it is read."""
    return (_FED / name).read_bytes()


def _searched(name: str, folder: Path) -> bytes:
    content = json.loads((_SEARCH / name).read_bytes())
    return json.dumps({k: v for k, v in content.items() if k != "crc32"}).encode()


def _some_config(folder: Path) -> bytes:
    return default_config().to_json().encode()


def _some_flags(folder: Path) -> bytes:
    fields = {
        "updates": 30,
        "batch_size": 4,
        "optim.lr": 0.1,
        "optim.args": "{}",
        "optim.schedule": "piecewise",
        "optim.boundaries": "(15, 20)",
        "echo.factor": 2.5,
        "echo.order": "spread",
        "echo.buffer": 100,
        "data.workers": 2,
    }
    return "\n".join(f"--config.{k}={v}" for k, v in fields.items()).encode()


def _prepared_folder(folder: Path) -> bytes:
    """A prepared folder, whose files lie beside what is changed in it."""
    from echo_jax.data.prepare import Settings, prepare_images

    out = folder / "beside"
    prepare_images([str(write_images(folder / "s", 6))], Settings(out=out))
    content = json.loads((out / "dataset.json").read_text())
    del content["crc32"]
    return json.dumps(content).encode()


def _fuzzed(
    name: str,
    valid: Callable[[Path], bytes],
    parse: Callable[[str], None],
    pack: Callable[[bytes], bytes] | None,
    beside: str | Path | None,
    rng: random.Random,
    bench: Bench,
) -> Outcome:
    """Has a parser read a file that was changed.

    Args:
      name: Of the file.
      valid: Makes a valid one.
      parse: Of a module, takes the path.
      pack: Compresses what was changed, mostly: else the compressed is changed.
      beside: The folder that it belongs into; a text is one of the bench's.
      rng: Decides how.
      bench: Where.
    """
    made = f"valid-{name}-{parse.__name__}"
    data = bench.once(made, valid)
    if isinstance(beside, str):
        beside = bench.place(made) / beside

    def read(content: bytes, folder: Path) -> Outcome:
        if beside is not None:
            shutil.copytree(beside, folder)
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        return isolated(parse, str(folder / name), limit_s=_LIMIT_S)

    # What was never taken as it was shows nothing when it is refused.
    packed = data if pack is None else pack(data)
    before = bench.once(f"{made}-read", lambda folder: read(packed, folder / "read"))
    if before.note != "taken":
        raise CannotBeginError(f"{name} is refused as it is: {before.note}")
    if pack is None or rng.random() < 0.5:
        data = mutate(data if pack is None else pack(data), rng)
    else:
        data = pack(mutate(data, rng))
    return read(data, bench.folder / "read")


def _parser(name, valid, parse, pack=None, beside=None):
    return partial(_fuzzed, name, valid, parse, pack, beside)


_RUN_FILES = ("environment.json", "metrics.jsonl", "summary.json")
F6 = Fault(
    name="F6",
    title="Files of users that were changed as a fuzzer does, at every parser",
    holds="taken, skipped, or refused in a sentence, within 1 GiB and a minute",
    trials={
        "JPEG": _parser("a.jpg", partial(_encoded, ".jpg"), _image),
        "PNG": _parser("a.png", partial(_encoded, ".png"), _image),
        "tar": _parser("a.tar", lambda f: _tar(f, "w"), _images_of),
        "tar.gz": _parser(
            "a.tar.gz", lambda f: _tar(f, "w"), _images_of, gzip.compress
        ),
        "zip": _parser("a.zip", some_zip, _images_of),
        "parquet": _parser("a.parquet", some_parquet, _images_of),
        "shard of WebDataset": _parser("train-0.tar", some_shard, read_shard),
        "list of classes": _parser(
            "a.csv", some_class_list, read_class_list, beside="beside"
        ),
        "safetensors": _parser("a.safetensors", some_tensors, read_tensors),
        "COCO json": _parser("a.json", _annotations, _coco),
        "COCO json.gz": _parser("a.json.gz", _annotations, _coco, gzip.compress),
        "text": _parser("a.txt", lambda _: _TEXT, _text),
        "text.xz": _parser("a.txt.xz", lambda _: _TEXT, _text, lzma.compress),
        "dataset.json": _parser(
            "dataset.json", _prepared_folder, _dataset, beside="beside"
        ),
        "record": _parser("a.record", _some_record, _record),
        **{
            name: _parser(name, partial(_published, name), _run_of, beside=_FED)
            for name in _RUN_FILES
        },
        "config.json": _parser("config.json", _some_config, _run_of, beside=_FED),
        "study.json": _parser(
            "study.json",
            partial(_published, "../study.json"),
            _study,
            beside=_FED.parent,
        ),
        "search: study.json": _parser(
            "study.json", partial(_searched, "study.json"), _search, beside=_SEARCH
        ),
        "search: trials": _parser(
            "e4.confirm-0.json", partial(_searched, "trials/e4.confirm-0.json"), _trials
        ),
        "decision log": _parser("tape.json", _some_log, _log),
        "config flags": _parser("flags.txt", _some_flags, _flags),
    },
    limit_s=_LIMIT_S + 30,
)
