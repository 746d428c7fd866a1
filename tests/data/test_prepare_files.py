"""Files of folders, archives and Parquet are read whole; hostile ones are refused."""

import gzip
import io
import os
import stat
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from prepare_cases import (
    class_folders,
    make_image,
    member,
    prepare,
    records,
    refusal,
    write,
    write_parquet,
    write_tar_to,
)

from echo_jax.data.prepare import PrepareError

FILES = {
    name: make_image(k) for k, name in enumerate(("b/x.jpg", "a/y.jpg", "a/z.jpg"))
}
PACKED = [".tar", ".tar.gz", ".tar.xz", ".tar.bz2"]


def listed(path, **more):
    """The images of a source by name, in order; a shard for each."""
    out = Path(f"{path}-out")
    prepare(out, str(path), **{"classes": "last", "shard_mb": 0.0005} | more)
    return {record["name"]: record["image"] for record in records(out, "train")}


def refused(path, **more):
    said = refusal(Path(f"{path}-out"), str(path), **more)
    assert Path(path).name in said
    return said


@pytest.mark.parametrize("kind", ["", *PACKED, ".zip"])
def test_visible_files_are_read_in_their_order(tmp_path, kind):
    long = f"{'/'.join(['deep' * 20] * 5)}/x.jpg"
    hidden = {".git/a.jpg": b"1", "a/._x.jpg": b"2", "a/.DS_Store": b"3"}
    dotted = f"{'./' if kind in PACKED else ''}{long}"
    files = {**FILES, dotted: FILES["a/y.jpg"], **hidden}
    found = [*listed(write(tmp_path / f"x{kind}", files)).items()]
    expected = [*FILES.items(), (long, FILES["a/y.jpg"])]
    assert found == (expected if kind else sorted(expected))


@pytest.mark.parametrize("kind", ["", ".tar.gz", ".zip"])
def test_a_folder_of_a_source_is_a_source(tmp_path, kind):
    files = {f"a/{name}": image for name, image in FILES.items()}
    path = write(tmp_path / f"x{kind}", {"a0/c/x.jpg": make_image(9), **files})
    out = tmp_path / "out"
    info = prepare(out, f"{path}/a", shard_mb=0.0005)
    assert {r["name"]: r["image"] for r in records(out, "train")} == FILES
    (whole,) = prepare(tmp_path / "whole", path, classes="first")["source"]["train"]
    if kind:
        assert info["source"]["train"] == [{**whole, "path": f"{path}/a"}]
        with pytest.raises(PrepareError, match="holds no folder 'c'; name one that it"):
            prepare(tmp_path / "no", f"{path}/c")


def tar_of(files):
    write_tar_to(file := io.BytesIO(), files)
    return file.getvalue()


INNER = tar_of({"n01_1.jpg": FILES["b/x.jpg"], ".n01.jpg": b"4"})


@pytest.mark.parametrize("kind", [".tar", ".tar.gz"])
def test_an_archive_within_an_archive_is_a_folder(tmp_path, kind):
    nested = {
        "n01.tar": INNER,
        "list.txt": b"a list",
        "sub/n02.TAR": tar_of({"a/n02_1.jpg": FILES["a/y.jpg"], "deep.tar": INNER}),
    }
    path = write(tmp_path / f"x{kind}", nested)
    expected = {"n01/n01_1.jpg": "b/x.jpg", "sub/n02/a/n02_1.jpg": "a/y.jpg"}
    assert listed(path) == {name: FILES[of] for name, of in expected.items()}


LINK = member("x", tarfile.SYMTYPE, linkname="/etc/passwd")


def test_an_archive_within_an_archive_is_not_believed(tmp_path):
    def said(inner, after=b""):
        outer = {"n01.tar": inner, "b.bin": after}
        return refused(write(tmp_path / "x.tar", outer))

    assert "leads out of the folder" in said(tar_of({"x": member("../x.jpg")}))
    assert "is a link, a device or a sparse file" in said(tar_of({"x": LINK}))
    assert "'n01', an archive in it, has no end" in said(b"")
    assert "an archive in it is none" in said(b"no archive" * 100)
    # A member that reaches into what follows its archive.
    reaching = member("x.jpg", size=1 << 20).tobuf() + b"1" * 512
    assert "claims more than there is" in said(reaching, bytes(1 << 21))
    # A whole one ends by zeros, and so may one that is cut among them.
    whole = tar_of({"a.jpg": b"1" * 700})
    for length in range(1, whole.rindex(b"1") + 1, 256):
        assert "not to be trusted" in said(whole[:length], b"3" * 2000), length


def test_links_in_a_folder_are_followed_but_not_in_circles(tmp_path):
    write(tmp_path / "elsewhere", {"cat/1.jpg": FILES["b/x.jpg"]})
    (folder := tmp_path / "x").mkdir()
    (folder / "cat").symlink_to(tmp_path / "elsewhere" / "cat")
    (folder / "again").symlink_to(folder)
    assert listed(folder) == {"cat/1.jpg": FILES["b/x.jpg"]}


def test_what_is_no_file_in_a_folder_is_refused(tmp_path):
    (folder := tmp_path / "x").mkdir()
    for name, make, message in (
        ("pipe", os.mkfifo, "pipe' is neither a file nor a folder"),
        ("broken", lambda path: path.symlink_to("nowhere"), "broken' cannot be opened"),
        ("two\nlines", Path.touch, "name that is not printable UTF-8"),
    ):
        make(folder / name)
        assert message in refused(folder)
        (folder / name).unlink()


@pytest.mark.parametrize("name", ["x.7z", "x"])
def test_another_kind_of_file_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    said = refused(tmp_path / name)
    assert "neither a folder nor a file named .zip, .tar, .tar.gz" in said
    assert "does not exist; name a file" in refused(tmp_path / f"no-{name}")


HOSTILE = [
    (member("a/../../up"), "member 'a/../../up' leads out"),
    (member("/etc/passwd"), "member '/etc/passwd' leads out"),
    (LINK, "'x' is a link"),
    (member("x", tarfile.LNKTYPE, linkname="b/x.jpg"), "'x' is a link"),
    (member("x", tarfile.FIFOTYPE), "'x' is a link, a device"),
    (member("a\nb"), "not printable"),
    (member("n" * 1025), "more than 1024 characters"),
    (member("x", pax_headers={"comment": "y" * 2**21}), "asks for"),
]


@pytest.mark.parametrize("kind", [".tar", ".tar.gz"])
def test_a_hostile_member_is_refused_by_name(tmp_path, kind):
    for info, message in HOSTILE:
        assert message in refused(
            write(tmp_path / f"x{kind}", {"a/x": info, "after": b""})
        )
    assert not (tmp_path.parent / "up").exists()


def test_a_header_longer_than_any_memory_is_refused(tmp_path):
    path = Path(
        write(tmp_path / "x.tar", {"a/x": member("x", pax_headers={"comment": "y"})})
    )
    data = path.read_bytes()
    at = data.index(b" comment=y") - 2
    record = (b"9" * 20 + b" comment=y\n").ljust(40, b"\0")
    path.write_bytes(data[:at] + record + data[at + 40 :])
    assert "x.tar' is damaged, cut off, or not to be trusted" in refused(path)


def test_a_sparse_member_is_refused(tmp_path):
    path = tmp_path / "x.tar"
    headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    headers |= {"GNU.sparse.name": "big", "GNU.sparse.realsize": str(2**40)}
    info = member("big", size=512, pax_headers=headers)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO(b"1\n0\n512\n".ljust(512, b"\0")))
    assert "sparse" in refused(path)


@pytest.mark.parametrize("kind", PACKED)
def test_a_cut_or_damaged_archive_is_refused(tmp_path, kind):
    files = {"a/x.jpg": b"1" * 700, "b/y.jpg": b"", "c": b"2" * 512}
    path = Path(write(tmp_path / f"x{kind}", files))
    whole = path.read_bytes()
    # Headers and contents are 6 blocks; one of zeros ends a tar, the rest is padding.
    end = 7 * 512 if kind == ".tar" else len(whole)
    for length in {*range(0, end, end // 10), *range(end - 3, end)}:
        path.write_bytes(whole[:length])
        assert "cut off" in refused(path)
    if kind != ".tar":
        damaged = whole[: end // 2] + bytes([whole[end // 2] ^ 255])
        path.write_bytes(damaged + whole[len(damaged) :])
        assert "damaged" in refused(path)


def zip_member(name, **fields):
    info = zipfile.ZipInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (zip_member("../up"), "'../up' leads out of the folder"),
        (zip_member("a\x1b[2Jb"), "'a\\x1b[2Jb' has a name that is not printable"),
        (zip_member("l", external_attr=(stat.S_IFLNK | 0o777) << 16), "is a link or"),
        (zip_member("b", compress_type=zipfile.ZIP_BZIP2), "by another method"),
    ],
)
def test_what_no_zip_of_data_holds_is_refused(tmp_path, member, message):
    assert message in refused(write(tmp_path / "x.zip", {**FILES, member: b"1"}))


def test_a_zip_is_not_believed(tmp_path):
    path = Path(write(tmp_path / "x.zip", {"a/1.jpg": bytes(700), "b/2.jpg": b"2"}))
    whole = path.read_bytes()
    first, second = (whole.index(b"PK\1\2", at) for at in (0, whole.rindex(b"PK\1\2")))
    huge = zipfile.ZipFile(path).infolist()[0].compress_size * 1032 + 1
    for at, value, message in (
        (first + 24, huge.to_bytes(4, "little"), "'a/1.jpg' claims to unpack to"),
        (first + 8, b"\1\0", "'a/1.jpg' is encrypted"),
        (second + 20, len(whole).to_bytes(4, "little"), "from the same bytes"),
        # Its content is another than its checksum says.
        (41, b"\xff\xff", "'a/1.jpg' (unreadable file)"),
    ):
        path.write_bytes(whole[:at] + value + whole[at + len(value) :])
        more = {"classes": "last"}
        assert message in refusal(tmp_path / "out", str(path), **more)
    for length in range(0, len(whole), 20):
        path.write_bytes(whole[:length])
        assert "cut off" in refused(path)


def test_a_bomb_is_refused(tmp_path):
    path, header = tmp_path / "x.tar.gz", member("a/x.jpg", size=2**30).tobuf()
    path.write_bytes(gzip.compress(header) + gzip.compress(bytes(2**24)) * 17)
    assert "unpacks to more than 250 times its size" in refused(path)


pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def test_images_and_labels_in_parquet_are_those_of_the_rows(tmp_path):
    train = write_parquet(tmp_path / "train.parquet", range(8))
    test = write_parquet(tmp_path / "test.parquet", [1, 0])
    out = tmp_path / "out"
    info = prepare(out, f"train={train}", f"test={test}", holdout=0.3)
    assert info["classes"] == ["ant", "cat"]
    found = records(out, "train") + records(out, "validation")
    assert len(records(out, "train")) < 8
    assert sorted(found, key=lambda record: record["name"][-8:]) == [
        {
            "image": make_image(k, ".png"),
            "label": 1 - k % 2,
            "name": f"{('cat', 'ant')[k % 2]}/{k:08}.png",
        }
        for k in range(8)
    ]
    assert [record["label"] for record in records(out, "test")] == [0, 1]


@pytest.mark.parametrize(
    ("labels", "folders"),
    [
        (["b/c", "a", None], ["b_c/", "a/", ""]),
        ([10.0, 9.0, None], ["10/", "9/", ""]),
        ([1.5, 9.0, 9.0], ["1.5/", "9/", "9/"]),
    ],
)
def test_labels_without_names_are_names(tmp_path, labels, folders):
    images = [*class_folders(2).values(), None]
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"image": images, "label": labels}), path)
    names = [f"{folder}{k:08}.png" for k, folder in enumerate(folders)]
    assert listed(path, max_bad="1") == dict(zip(names, images[:2], strict=False))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [b"1"]}, "of its columns image, one must hold images and one be"),
        ({"a": [b"1"], "b": [b"1"], "label": [1]}, "columns a, b, label, one must"),
        ({"image": [b"1"], "label": [".."]}, "class '..' leads out of the folder"),
        ({"image": [b"1"], "label": ["a\x1b[2J"]}, "is not printable"),
    ],
)
def test_other_columns_are_refused(tmp_path, columns, message):
    parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    assert message in refused(tmp_path / "x.parquet")


def test_a_damaged_parquet_file_and_unknown_labels_are_refused(tmp_path, monkeypatch):
    path = Path(write_parquet(tmp_path / "x.parquet", range(8)))
    whole = path.read_bytes()
    for length in range(0, len(whole), 997):
        path.write_bytes(whole[:length])
        assert "cannot be read" in refused(path)
    table = pyarrow.table({"image": [b"1"], "label": [2]})
    about = '{"info": {"features": {"label": {"names": %s}}}}'
    for text in (about % '["cat", "ant"]', about % "5", "[]"):
        table = table.replace_schema_metadata({"huggingface": text})
        parquet.write_table(table, path)
        assert "cannot be read" in refused(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'echo-jax[parquet]'" in refused(path)
