"""Valid files for the fuzzer, beside those of `parsers`, and what reads them."""

import io
import json
import tarfile
import zipfile
from pathlib import Path

from benchmarks.faults.files import write_images
from benchmarks.faults.made_files import write_exported


def some_zip(folder: Path) -> bytes:
    """Class folders of images, in an archive."""
    source = write_images(folder / "images", 4)
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(source.rglob("*.jpg")):
            archive.write(path, path.relative_to(source).as_posix())
    return data.getvalue()


def some_parquet(folder: Path) -> bytes:
    """Images with labels, as Hugging Face keeps them."""
    import pyarrow
    from pyarrow import parquet

    images = sorted(write_images(folder / "images", 6).rglob("*.jpg"))
    kind = {"names": ["ant", "cat"], "_type": "ClassLabel"}
    about = {"info": {"features": {"img": {"_type": "Image"}, "label": kind}}}
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    rows = [{"bytes": path.read_bytes(), "path": path.name} for path in images]
    labels = [number % 2 for number in range(len(images))]
    table = pyarrow.table({"img": pyarrow.array(rows, image), "label": labels})
    data = io.BytesIO()
    parquet.write_table(
        table.replace_schema_metadata({"huggingface": json.dumps(about)}), data
    )
    return data.getvalue()


def some_shard(folder: Path) -> bytes:
    """Images with labels, as WebDataset keeps them."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        images = sorted(write_images(folder / "images", 6).rglob("*.jpg"))
        for number, path in enumerate(images):
            label = str(number % 2).encode()
            for suffix, content in (("jpg", path.read_bytes()), ("cls", label)):
                member = tarfile.TarInfo(f"{number:03}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


def read_shard(path: str) -> None:
    """Reads what is known of a shard, every example, and its image."""
    from echo_jax.data.images.decode import decode_image
    from echo_jax.data.sources.source import open_source

    records, decode = open_source(f"wds:{Path(path).parent}", "train", "images")
    # The names of classes go into files of a run, which may be published.
    Path(path).with_name("known.json").write_text(json.dumps(records.info))
    for index in range(min(len(records), 100)):
        decode_image(decode(records[index])["image"])


def some_class_list(folder: Path) -> bytes:
    """The classes of the images in the folder ``beside``."""
    write_images(folder / "beside" / "images", 6)
    rows = [f"00{n}.jpg,{('ant', 'cat')[n % 2]}" for n in range(6)]
    return "\n".join(["file,class", *rows, ""]).encode()


def read_class_list(path: str) -> None:
    """Prepares the images beside a list of their classes."""
    from echo_jax.data.prepare import Settings, prepare_images

    out = Path(path).with_name("out")
    settings = Settings(out=out, max_bad="50%", workers=1)
    prepare_images([str(Path(path).with_name("images"))], settings, path)


def some_tensors(folder: Path) -> bytes:
    """Weights without hashes, as another program writes them."""
    from safetensors.numpy import load_file, save

    return save(load_file(next(write_exported(folder).iterdir())))


def read_tensors(path: str) -> None:
    """Reads weights as ``config.init_from`` does."""
    from echo_jax.training.saving.weights import read_weights

    read_weights(path)
