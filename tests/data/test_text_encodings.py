"""Text that Windows has written is read as the same characters, by every reader."""

import gzip

import pytest
from prepare_cases import coco_json, make_image, prepare, records, write

from echo_jax.data.prepare import Settings, TextSettings, prepare_coco, prepare_text
from echo_jax.data.sources import open_source
from echo_jax.data.text import open_sequences

TEXT = "".join(f"Zeile {n} für alle.\n\n" for n in range(40)).encode()
IMAGES = dict.fromkeys(("n01/1.jpg", "n02/2.jpg"), make_image(0))
AS = {
    "mark": lambda text: b"\xef\xbb\xbf" + text,
    "windows": lambda text: b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"),
    "old mac": lambda text: text.replace(b"\n", b"\r"),
}


def blocks(folder, written):
    (folder / "a.txt.gz").write_bytes(gzip.compress(written(TEXT)))
    text = TextSettings(tokenizer="bytes", block=8, document="blank")
    info = prepare_text([f"{folder}/a.txt.gz"], Settings(out=folder / "out"), text)
    assert info["read_as"] == {"encoding": "utf-8-sig", "newlines": "universal"}
    split = info["splits"]["train"]
    return records(folder / "out", "train"), split["bytes"], split["documents"]


def corpus(folder, written):
    for name in ("a.txt", "b.txt"):
        (folder / name).write_bytes(written(TEXT))
    found = open_sequences(f"{folder}/*.txt", seq_len=8)
    return [found.train[n] for n in range(len(found.train))]


def listed(name, text, option):
    def read(folder, written):
        (folder / name).write_bytes(written(text))
        source = write(folder / "x", IMAGES)
        info = prepare(folder / "out", source, **{option: folder / name})
        found = records(folder / "out", "train")
        return info["classes"], [record["label"] for record in found]

    return read


def class_names(folder, written):
    label = written(b"1\n")
    members = {"a.jpg": make_image(0), "a.cls": b"1" if b"\0" in label else label}
    write(folder / "train-0.tar", members)
    (folder / "classes.txt").write_bytes(written("Käfer\ncat\n".encode()))
    return open_source(f"wds:{folder}", "train", "images")[0].info["classes"]


def annotations(folder, written):
    box = {"id": 1, "image_id": 1, "category_id": 3, "bbox": [0, 0, 4, 4]}
    json = coco_json({1: ("1.jpg", 12, 10)}, [box]).replace(b", ", b",\n")
    (folder / "a.json").write_bytes(written(json))
    source = write(folder / "x", {"1.jpg": make_image(0)})
    prepare_coco([f"{folder}/a.json:{source}"], Settings(out=folder / "out"))
    return records(folder / "out", "train")


READERS = {
    "text": blocks,
    "corpus": corpus,
    "csv": listed("of.csv", b"1.jpg,b\n2.jpg,a\n", "classes"),
    "words": listed("words.txt", "n01\tKäfer\nn02\tb, c\n".encode(), "names"),
    "classes.txt": class_names,
    "COCO": annotations,
}


@pytest.mark.parametrize("reader", READERS)
def test_text_is_its_characters_whoever_wrote_it(tmp_path, reader):
    def read(name, written):
        (tmp_path / name).mkdir()
        return READERS[reader](tmp_path / name, written)

    plain = read("plain", bytes)
    for name, written in AS.items():
        assert read(name, written) == plain, name
    with pytest.raises(ValueError, match="iconv -f UTF-16 -t UTF-8") as caught:
        read("utf-16", lambda text: text.decode().encode("utf-16"))
    assert "utf-16" in str(caught.value) or "a.txt" in str(caught.value)
