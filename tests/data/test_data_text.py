import gzip
import hashlib
import lzma
import sysconfig
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from echo_jax.data.sources.text import TextWindows, decode_window, load_corpus
from echo_jax.files import compressed


def is_held_out(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 20 == 0


def test_stdlib_is_split_by_file():
    corpus = load_corpus("stdlib")
    root = Path(sysconfig.get_path("stdlib"))
    metadata = corpus.metadata
    assert metadata["train_files"] + metadata["validation_files"] == metadata["files"]
    assert metadata["train_bytes"] == len(corpus.train) > 10 * len(corpus.validation)
    assert metadata["validation_bytes"] == len(corpus.validation) > 50_000
    # `abc.py` and `ast.py` are there in every version; neither is held out.
    for name in ("abc.py", "ast.py"):
        assert not is_held_out(name)
        assert (root / name).read_bytes() in corpus.train.tobytes()
    assert corpus.metadata == load_corpus("stdlib").metadata


def test_stdlib_leaves_out_what_is_not_its_source(tmp_path, monkeypatch):
    def write(name: str, content: bytes) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    write("b.py", b"BB")
    write("pkg/a.py", b"AA")
    write("data.txt", b"no source")
    write("test/x.py", b"XX")
    write("pkg/tests/x.py", b"XX")
    write("site-packages/x.py", b"XX")
    write("_sysconfigdata_linux.py", b"XX")
    (tmp_path / "c.py").symlink_to(tmp_path / "data.txt")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    corpus = load_corpus("stdlib")
    assert corpus.metadata["files"] == 2
    assert {corpus.train.tobytes(), corpus.validation.tobytes()} == {b"AA", b"BB"}


def test_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ValueError, match="without its sources"):
        load_corpus("stdlib")


def test_files_follow_in_the_order_of_their_names(tmp_path):
    names = [f"{i}.txt" for i in range(100)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode() + b"|")
    corpus = load_corpus(str(tmp_path / "*.txt"))
    held_out = [name for name in sorted(names) if is_held_out(name)]
    trained = [name for name in sorted(names) if not is_held_out(name)]
    assert 0 < len(held_out) < 20
    assert corpus.validation.tobytes().decode() == "".join(f"{n}|" for n in held_out)
    assert corpus.train.tobytes().decode() == "".join(f"{n}|" for n in trained)


def test_few_files_still_have_one_held_out(tmp_path):
    names = ["a.txt", "one.txt", "two.txt"]
    assert not any(map(is_held_out, names))
    for name in names:
        (tmp_path / name).write_bytes(b"text")
    metadata = load_corpus(str(tmp_path / "*.txt")).metadata
    assert (metadata["train_files"], metadata["validation_files"]) == (2, 1)


def test_one_file_holds_out_its_last_twentieth(tmp_path):
    content = bytes(range(14, 214))
    (tmp_path / "one.txt").write_bytes(content)
    corpus = load_corpus(str(tmp_path / "one.txt"))
    assert corpus.train.tobytes() == content[:190]
    assert corpus.validation.tobytes() == content[190:]
    assert corpus.metadata["split"] == "last twentieth of the file"


@pytest.mark.parametrize("suffix", [".txt", ".gz", ".xz"])
def test_every_format_gives_the_same_bytes(tmp_path, suffix):
    halves = [b"first half, " * 1000, b"second half. " * 1000]
    encode = {
        ".txt": lambda data: data,
        ".gz": gzip.compress,
        # Streams may be padded with zeros, four at a time.
        ".xz": lambda data: lzma.compress(data) + b"\0" * 8,
    }[suffix]
    path = tmp_path / f"text{suffix}"
    # Archives may hold several streams one after another.
    path.write_bytes(encode(halves[0]) + encode(halves[1]))
    corpus = load_corpus(str(path))
    joined = corpus.train.tobytes() + corpus.validation.tobytes()
    assert joined == halves[0] + halves[1]


def test_hash_tells_contents_and_file_borders_apart(tmp_path):
    hashes = set()
    for contents in (["ab", "c"], ["a", "bc"], ["ab", "d"]):
        for name, content in zip(("x.txt", "y.txt"), contents, strict=True):
            (tmp_path / name).write_text(content)
        hashes.add(
            load_corpus(f"{tmp_path}/x.txt, {tmp_path}/y.txt").metadata["sha256"]
        )
    assert len(hashes) == 3


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_decompression_bomb_is_refused_before_it_unfolds(tmp_path, pack):
    suffix = ".gz" if pack is gzip.compress else ".xz"
    bomb = tmp_path / f"bomb{suffix}"
    bomb.write_bytes(pack(bytes(64 * 1024**2)))
    assert bomb.stat().st_size < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"more than 1000000 bytes.*bomb"):
            load_corpus(str(bomb), max_bytes=1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 16 * 1024**2
    finally:
        tracemalloc.stop()


def test_limit_holds_for_all_files_together(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(bytes(600))
    load_corpus(str(tmp_path / "*.txt"), max_bytes=1200)
    with pytest.raises(ValueError, match=r"more than 1199 bytes.*b\.txt"):
        load_corpus(str(tmp_path / "*.txt"), max_bytes=1199)


def test_xz_may_not_ask_for_much_memory(tmp_path, monkeypatch):
    path = tmp_path / "greedy.xz"
    path.write_bytes(lzma.compress(b"text" * 100, preset=6))
    monkeypatch.setattr(compressed, "_MAX_XZ_MEMORY_BYTES", 1024**2)
    with pytest.raises(ValueError, match=r"greedy\.xz.*no intact"):
        load_corpus(str(path))


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_damaged_archive_is_refused_by_name(tmp_path, suffix):
    path = tmp_path / f"broken{suffix}"
    whole = {".gz": gzip, ".xz": lzma}[suffix].compress(b"some text" * 1000)
    damaged = [whole[: len(whole) // 2], b"no archive at all", whole[:-20] + bytes(20)]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"broken{suffix}.*no intact"):
            load_corpus(str(path))


@pytest.mark.parametrize(
    ("source", "error", "named"),
    [
        ("", FileNotFoundError, "Use 'stdlib'"),
        ("nowhere.txt", FileNotFoundError, r"'nowhere\.txt' matches no file"),
        ("one.txt,,", FileNotFoundError, "matches no file"),
        ("one.zip", ValueError, r"'.zip'.*\.txt, \.gz, \.xz"),
        ("one.txt,sub/one.txt", ValueError, r"two files called 'one\.txt'"),
    ],
)
def test_bad_source_is_refused(tmp_path, monkeypatch, source, error, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("one.txt", "one.zip", "sub/one.txt"):
        (tmp_path / name).write_bytes(bytes(100))
    with pytest.raises(error, match=named):
        load_corpus(source)


def test_windows_do_not_overlap_and_drop_the_rest():
    windows = TextWindows(np.frombuffer(b"abcdefgh", np.uint8), 3)
    assert [windows[i] for i in range(len(windows))] == [b"abc", b"def"]
    tokens = decode_window(windows[1])["tokens"]
    assert tokens.dtype == np.uint8
    assert tokens.tolist() == [100, 101, 102]


def test_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="2 bytes holds no window of 3"):
        TextWindows(np.zeros(2, np.uint8), 3)
