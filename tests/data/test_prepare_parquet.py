"""Images in parquet files are read as if each lay in a folder of its class."""

import sys

import pytest
from prepare_cases import make_image, records, write_parquet

from echo_jax.data.prepare import PrepareError, Settings, prepare_images
from echo_jax.data.prepare.files import open_files

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def opened(path):
    return open_files(path, lambda what, part: None)


def test_images_and_labels_are_those_of_the_rows(tmp_path):
    train = write_parquet(tmp_path / "train.parquet", range(8))
    test = write_parquet(tmp_path / "test.parquet", [1, 0])
    out = tmp_path / "out"
    info = prepare_images([f"train={train}", f"test={test}"], Settings(out=out))
    assert info["classes"] == ["ant", "cat"]
    assert records(out, "train") == [
        {
            "image": make_image(k, ".png"),
            "label": 1 - k % 2,
            "name": f"{('cat', 'ant')[k % 2]}/{k:08}.png",
        }
        for k in range(8)
    ]
    assert [record["label"] for record in records(out, "test")] == [0, 1]


@pytest.mark.parametrize("written", [float, str])
def test_labels_with_names_are_whole_numbers_however_written(tmp_path, written):
    write_parquet(tmp_path / "x.parquet", [1, 0])
    table = parquet.read_table(tmp_path / "x.parquet")
    for label, message in ((1, ""), (1.5, "label '?1.5'? is none"), (2, "label 2 is")):
        column = pyarrow.array([written(label), written(0)])
        parquet.write_table(
            table.set_column(1, "label", column), tmp_path / "y.parquet"
        )
        if message:
            with pytest.raises(PrepareError, match=message):
                opened(tmp_path / "y.parquet")
            continue
        names = [entry.name for entry in opened(tmp_path / "y.parquet").entries]
        assert names == ["ant/00000000.png", "cat/00000001.png"]


@pytest.mark.parametrize("wanted", [[], [0], [2, 3], [7], [1, 4, 6]])
def test_any_row_is_read(tmp_path, wanted):
    files = opened(tmp_path / write_parquet(tmp_path / "x.parquet", range(8)))
    images = [make_image(k, ".png") for k in wanted]
    assert [get() for get in files.contents(wanted, 10_000)] == images
    assert [get() for get in files.contents(wanted, 9)] == [
        each[:10] for each in images
    ]


@pytest.mark.parametrize(
    ("labels", "folders"),
    [
        (["b/c", "a", None], ["b_c/", "a/", ""]),
        ([10, 9, 10], ["10/", "9/", "10/"]),
        ([10.0, 9.0, None], ["10/", "9/", ""]),
        ([1.5, 9.0, 9.0], ["1.5/", "9/", "9/"]),
        (["1.0", "01", "1"], ["1.0/", "01/", "1/"]),
    ],
)
def test_labels_without_names_are_names(tmp_path, labels, folders):
    images = [b"1", b"22", None]
    parquet.write_table(
        pyarrow.table({"image": images, "label": labels}), tmp_path / "x.parquet"
    )
    files = opened(tmp_path / "x.parquet")
    names = [f"{folder}{k:08}.png" for k, folder in enumerate(folders)]
    assert [entry.name for entry in files.entries] == names
    assert [entry.bytes for entry in files.entries] == [1, 2, 0]
    assert [get() for get in files.contents([0, 1, 2], 9)] == [b"1", b"22", b""]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [b"1"]}, "of its columns image, one must hold images and one be"),
        ({"label": [1]}, "one must hold images"),
        ({"a": [b"1"], "b": [b"1"], "label": [1]}, "columns a, b, label, one must"),
        ({"image": [b"1"], "label": [".."]}, "class '..' leads out of the folder"),
        ({"image": [b"1"], "label": ["a\x1b[2J"]}, "is not printable"),
    ],
)
def test_other_columns_are_refused(tmp_path, columns, message):
    parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    with pytest.raises(PrepareError) as caught:
        opened(tmp_path / "x.parquet")
    assert message in str(caught.value)


def test_damage_and_unknown_labels_are_refused(tmp_path):
    path = tmp_path / "x.parquet"
    write_parquet(path, range(8))
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(PrepareError, match="cannot be read"):
            opened(path)
    table = pyarrow.table({"image": [b"1"], "label": [2]})
    about = '{"info": {"features": {"label": {"names": %s}}}}'
    for text, message in [
        (about % '["cat", "ant"]', "label 2 is none of its 2 classes"),
        (about % "5", "cannot be read"),
        ('{"info": []}', "cannot be read"),
        ("[]", "cannot be read"),
        ("{", "cannot be read"),
    ]:
        table = table.replace_schema_metadata({"huggingface": text})
        parquet.write_table(table, path)
        with pytest.raises(PrepareError, match=message):
            opened(path)


def test_what_to_install_is_said(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "x.parquet", [0])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PrepareError, match=r"pip install 'echo-jax\[parquet\]'"):
        opened(tmp_path / path)
