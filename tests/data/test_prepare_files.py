"""Folders and archives are listed and read; hostile ones are refused by name."""

import bz2
import gzip
import io
import lzma
import os
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest
from prepare_cases import write_folder, write_tar, write_tar_to, write_zip

from echo_jax.data.prepare import PrepareError
from echo_jax.data.prepare.files import open_files
from echo_jax.files import compressed
from echo_jax.files.compressed import ForwardReader, UnpackError, unpacked_chunks

FILES = {"b/x.bin": b"1" * 700, "a/y.bin": b"", "a/z.bin": b"2" * 512, "c": b"345"}
MODES = {".tar": "w", ".tar.gz": "w:gz", ".tar.xz": "w:xz", ".tar.bz2": "w:bz2"}


def listed(path, max_bytes=10_000):
    files = open_files(Path(path), lambda what, part: None)
    read = files.contents(range(len(files.entries)), max_bytes)
    return {e.name: get() for e, get in zip(files.entries, read, strict=True)}


def refusal(path):
    with pytest.raises(PrepareError) as caught:
        open_files(Path(path), lambda what, part: None)
    assert Path(path).name in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("suffix", MODES)
def test_an_archive_is_read_in_its_order(tmp_path, suffix):
    path = write_tar(tmp_path / f"x{suffix}", FILES, MODES[suffix])
    assert [*listed(path).items()] == [*FILES.items()]


@pytest.mark.parametrize("suffix", MODES)
@pytest.mark.parametrize("wanted", [[], [0], [3], [1, 2], [0, 3]])
def test_any_part_of_an_archive_is_read(tmp_path, suffix, wanted):
    path = write_tar(tmp_path / f"x{suffix}", FILES, MODES[suffix])
    files = open_files(Path(path), lambda what, part: None)
    read = [get() for get in files.contents(wanted, 600)]
    assert read == [[*FILES.values()][index][:601] for index in wanted]


def tar_of(files):
    """The bytes of an archive."""
    file = io.BytesIO()
    write_tar_to(file, files)
    return file.getvalue()


NESTED = {
    "n01.tar": tar_of({"n01_1.JPEG": b"1" * 700, "n01_2.JPEG": b"2"}),
    "list.txt": b"a list",
    "sub/n02.TAR": tar_of({"a/n02_1.JPEG": b"3" * 512, ".hidden": b"4"}),
}
AS_FOLDERS = {
    "n01/n01_1.JPEG": b"1" * 700,
    "n01/n01_2.JPEG": b"2",
    "list.txt": b"a list",
    "sub/n02/a/n02_1.JPEG": b"3" * 512,
}


@pytest.mark.parametrize("suffix", MODES)
def test_an_archive_within_an_archive_is_a_folder(tmp_path, suffix):
    path = write_tar(tmp_path / f"x{suffix}", NESTED, MODES[suffix])
    assert [*listed(path).items()] == [*AS_FOLDERS.items()]
    assert listed(f"{path}/n01") == {"n01_1.JPEG": b"1" * 700, "n01_2.JPEG": b"2"}
    # Within that one an archive is a file like any other.
    within = tar_of({"deep.tar": NESTED["n01.tar"]})
    path = write_tar(tmp_path / f"y{suffix}", {"n03.tar": within}, MODES[suffix])
    assert listed(path, 10**6) == {"n03/deep.tar": NESTED["n01.tar"]}


def test_an_archive_within_an_archive_is_not_believed(tmp_path):
    def refused(inner, after=b""):
        outer = {"n01.tar": inner, "b.bin": after}
        return refusal(write_tar(tmp_path / "x.tar", outer))

    info = tarfile.TarInfo("../x.jpg")
    assert "leads out of the folder" in refused(tar_of({"x": info}))
    info = tarfile.TarInfo("x.jpg")
    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
    assert "is a link, a device or a sparse file" in refused(tar_of({"x": info}))
    assert "'n01', an archive in it, has no end" in refused(b"")
    assert "an archive in it is none" in refused(b"no archive" * 100)
    # A member that reaches into what follows its archive.
    info = tarfile.TarInfo("x.jpg")
    info.size = 1 << 20
    reaching = info.tobuf() + b"1" * 512
    assert "claims more than there is" in refused(reaching, bytes(1 << 21))
    whole = NESTED["n01.tar"]
    # A whole one ends by zeros, and so may one that is cut among them.
    for length in range(1, whole.rindex(b"2") + 512, 256):
        assert "not to be trusted" in refused(whole[:length], b"3" * 2000), length


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    folder = write_folder(tmp_path / "x", FILES)
    assert [*listed(folder).items()] == sorted(FILES.items())


def test_hidden_files_are_left_out(tmp_path):
    hidden = {".git/a": b"1", "a/._x.jpg": b"2", ".DS_Store": b"3"}
    assert listed(write_folder(tmp_path / "x", {**FILES, **hidden})).keys() == {*FILES}
    assert listed(write_tar(tmp_path / "x.tar", {**FILES, **hidden})) == FILES


def test_leading_dots_and_long_names_are_normal(tmp_path):
    long = "/".join(["deep" * 20] * 5)
    files = {f"./{long}/x": b"1", "./y": b"2"}
    path = write_tar(tmp_path / "x.tar", files)
    assert listed(path) == {f"{long}/x": b"1", "y": b"2"}


def test_links_in_a_folder_are_followed_but_not_in_circles(tmp_path):
    write_folder(tmp_path / "elsewhere", {"cat/1": b"one"})
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "cat").symlink_to(tmp_path / "elsewhere" / "cat")
    (folder / "again").symlink_to(folder)
    assert listed(folder) == {"cat/1": b"one"}


def test_what_is_no_file_in_a_folder_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "pipe' is neither a file nor a folder" in refusal(tmp_path)
    (tmp_path / "pipe").unlink()
    (tmp_path / "broken").symlink_to("nowhere")
    assert "broken' leads nowhere" in refusal(tmp_path)
    (tmp_path / "broken").unlink()
    (tmp_path / "two\nlines").touch()
    assert "name that is not printable UTF-8" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["x.7z", "x.tgz", "x.gz", "x", "x.tar.zst"])
def test_another_kind_of_file_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    assert "neither a folder nor a file named .zip, .tar, .tar.gz" in refusal(
        tmp_path / name
    )


def test_a_missing_source_is_refused(tmp_path):
    assert "no such file or folder" in refusal(tmp_path / "nothing.tar")


def member(name, kind=tarfile.REGTYPE, size=0, **fields):
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    for field, value in fields.items():
        setattr(info, field, value)
    return info


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (member("../up"), "member '../up' leads out"),
        (member("a/../../up"), "member 'a/../../up' leads out"),
        (member("/etc/passwd"), "member '/etc/passwd' leads out"),
        (member("../folder", tarfile.DIRTYPE), "leads out"),
        (member("x", tarfile.SYMTYPE, linkname="/etc/passwd"), "'x' is a link"),
        (member("x", tarfile.LNKTYPE, linkname="b/x.bin"), "'x' is a link"),
        (member("x", tarfile.CHRTYPE), "'x' is a link, a device"),
        (member("x", tarfile.BLKTYPE), "'x' is a link, a device"),
        (member("x", tarfile.FIFOTYPE), "'x' is a link, a device"),
        (member("a\nb"), "not printable"),
        (member("n" * 1025), "more than 1024 characters"),
        (member("x", pax_headers={"comment": "y" * 2**21}), "asks for"),
    ],
)
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_a_hostile_member_is_refused_by_name(tmp_path, suffix, info, message):
    files = {**FILES, "hostile": info, "after": b""}
    path = write_tar(tmp_path / f"x{suffix}", files, MODES[suffix])
    assert message in refusal(path)
    assert not (tmp_path.parent / "up").exists()


def test_a_member_that_claims_to_be_huge_is_refused(tmp_path):
    path = tmp_path / "x.tar"
    write_tar(path, FILES)
    content = bytearray(path.read_bytes())
    huge = member("b/x.bin", size=2**40).tobuf(tarfile.GNU_FORMAT)
    content[:512] = huge[:512]
    path.write_bytes(content)
    assert "x.tar" in refusal(path)


def test_a_sparse_member_is_refused(tmp_path):
    path = tmp_path / "x.tar"
    headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    headers |= {"GNU.sparse.name": "big", "GNU.sparse.realsize": str(2**40)}
    info = member("big", size=512, pax_headers=headers)
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(info, io.BytesIO(b"1\n0\n512\n".ljust(512, b"\0")))
    assert "sparse" in refusal(path)


@pytest.mark.parametrize("suffix", MODES)
def test_a_cut_archive_is_refused_wherever_it_is_cut(tmp_path, suffix):
    path = Path(write_tar(tmp_path / f"x{suffix}", FILES, MODES[suffix]))
    whole = path.read_bytes()
    # Headers and contents are 8 blocks; one of zeros ends a tar, the rest is padding.
    end = 9 * 512 if suffix == ".tar" else len(whole)
    for length in {*range(0, end, end // 60), *range(end - 12, end)}:
        path.write_bytes(whole[:length])
        assert "cut off" in refusal(path)
    path.write_bytes(whole[:end])
    assert listed(path) == FILES


def test_damage_is_refused(tmp_path):
    path = Path(write_tar(tmp_path / "x.tar.gz", FILES, "w:gz"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    assert "damaged" in refusal(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("wanted", [[], [0], [3], [1, 2], [0, 1, 2, 3]])
def test_any_part_of_a_zip_is_read(tmp_path, method, wanted):
    path = write_zip(tmp_path / "x.zip", {".git/a": b"1", "b/": b"", **FILES}, method)
    files = open_files(Path(path), lambda what, part: None)
    assert [entry.name for entry in files.entries] == [*FILES]
    # In any order.
    read = [get() for get in reversed([*files.contents(wanted, 600)])]
    assert read[::-1] == [[*FILES.values()][index][:601] for index in wanted]


@pytest.mark.parametrize("name", ["x.zip", "x.tar", "x.tar.gz"])
def test_a_folder_of_an_archive_is_a_source(tmp_path, name):
    path = tmp_path / name
    files = {"a/b/c.bin": b"1", "a/d.bin": b"2", "ab/e.bin": b"3", "a/f.bin": b"4"}
    if name == "x.zip":
        write_zip(path, files)
    else:
        write_tar(path, files, MODES[name[1:]])
    assert listed(path / "a") == {"b/c.bin": b"1", "d.bin": b"2", "f.bin": b"4"}
    assert listed(path / "a" / "b") == {"c.bin": b"1"}
    below = open_files(path / "a", lambda what, part: None)
    whole = open_files(path, lambda what, part: None)
    assert below.metadata == {**whole.metadata, "path": f"{path}/a"}
    assert [get() for get in below.contents([0, 2], 9)] == [b"1", b"4"]
    with pytest.raises(PrepareError, match="holds no folder 'c'; name one that it has"):
        open_files(path / "c", lambda what, part: None)


def zip_member(name, **fields):
    info = zipfile.ZipInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (zip_member("../up"), "'../up' leads out of the folder"),
        (zip_member("/etc/x"), "leads out of the folder"),
        (zip_member("a\x1b[2Jb"), "'a\\x1b[2Jb' has a name that is not printable"),
        (zip_member("n" * 1025), "more than 1024 characters"),
        (zip_member("l", external_attr=(stat.S_IFLNK | 0o777) << 16), "is a link or"),
        (zip_member("p", external_attr=stat.S_IFIFO << 16), "is a link or a device"),
        (zip_member("b", compress_type=zipfile.ZIP_BZIP2), "by another method"),
    ],
)
def test_what_no_zip_of_data_holds_is_refused(tmp_path, member, message):
    path = write_zip(tmp_path / "x.zip", {**FILES, member: b"elsewhere"})
    assert message in refusal(path)


def test_a_zip_is_not_believed(tmp_path):
    path = Path(write_zip(tmp_path / "x.zip", {"a": b"1" * 700, "b": b"2"}))
    whole = path.read_bytes()
    first, second = (whole.index(b"PK\1\2", at) for at in (0, whole.rindex(b"PK\1\2")))
    sizes = zipfile.ZipFile(path).infolist()

    def changed(at, value):
        return whole[:at] + value + whole[at + len(value) :]

    huge = (sizes[0].compress_size * 1032 + 1).to_bytes(4, "little")
    path.write_bytes(changed(first + 24, huge))
    assert "'a' claims to unpack to" in refusal(path)
    path.write_bytes(changed(first + 8, b"\1\0"))
    assert "'a' is encrypted" in refusal(path)
    # Two members of the same bytes.
    path.write_bytes(changed(second + 20, len(whole).to_bytes(4, "little")))
    assert "packed from the same bytes" in refusal(path)
    # Its content is another than its checksum says.
    path.write_bytes(changed(31, b"\0\0"))
    files = open_files(path, lambda what, part: None)
    (read,) = files.contents([0], 10_000)
    with pytest.raises(OSError, match="'a' is damaged"):
        read()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert "cut off" in refusal(path)


PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", PACK)
def test_a_bomb_is_refused(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(compressed, "_ANY_RATIO_BYTES", 2**20)
    path = tmp_path / f"x{suffix}"
    path.write_bytes(PACK[suffix](bytes(2**23)))
    seen = 0
    with pytest.raises(UnpackError, match="unpacks to more than 250 times its size"):
        for chunk in unpacked_chunks(path):
            seen += len(chunk)
    # No more was unpacked than had to be.
    assert seen <= max(2**20, 250 * path.stat().st_size) + 2**20


@pytest.mark.parametrize("suffix", [*PACK, ".txt"])
def test_what_shrinks_well_is_read(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    content = b"some text " * 100_000
    path.write_bytes(PACK.get(suffix, bytes)(content) * 2)
    positions = []
    assert b"".join(unpacked_chunks(path, positions.append)) == content * 2
    assert positions[-1] == path.stat().st_size


def test_a_forward_reader_reads_and_skips():
    reader = ForwardReader(iter([b"0123", b"45", b"6789"]), max_read_bytes=5)
    assert reader.read(5) == b"01234" and reader.tell() == 5
    assert reader.seek(8) == 8 and reader.read(5) == b"89" == reader.last
    assert reader.read(1) == b"" and reader.tell() == 10
    with pytest.raises(OSError, match="6 bytes at once"):
        reader.read(6)
    with pytest.raises(OSError, match="backwards"):
        reader.seek(9)
    with pytest.raises(OSError, match="bytes at once"):
        reader.read(-1)
