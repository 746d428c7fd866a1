"""Text becomes blocks from which its tokens, and its text, can be had back."""

import bz2
import gzip
import hashlib
import io
import itertools
import lzma
import os
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from prepare_cases import contents, records, write

from echo_jax.data.prepare import PrepareError, Settings, TextSettings, prepare_text
from echo_jax.data.sources import PreparedError, read_info, verify

PACK = {
    ".txt": bytes,
    ".gz": gzip.compress,
    # Streams may be padded with zeros, four at a time.
    ".xz": lambda data: lzma.compress(data) + b"\0" * 8,
    ".bz2": bz2.compress,
}
WORDS = ["the", "cat", "sat", "on a", "mat", "and an", "<unk>", "=", "é", "漢字", "\t"]
EOD = 256


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def make_text(num_lines, seed=0):
    rng = np.random.default_rng(seed)
    lines = [" ".join(rng.choice(WORDS, rng.integers(9))) for _ in range(num_lines)]
    return "\n".join(lines) + "\n"


def prepare(out, *sources, text=None, **settings):
    text = {"tokenizer": "bytes", "block": 8, **(text or {})}
    sources = [str(source) for source in sources]
    return prepare_text(sources, Settings(out=out, **settings), TextSettings(**text))


def refusal(out, *sources, **kwargs):
    with pytest.raises(PrepareError) as caught:
        prepare(out, *sources, **kwargs)
    with pytest.raises(PreparedError):
        read_info(out)
    return str(caught.value)


def stream(out, split="train"):
    """The tokens that blocks were cut from, but those that were left out."""
    found = records(out, split)
    blocks = [np.frombuffer(record["tokens"], "<u2").tolist() for record in found]
    for one, after in itertools.pairwise(blocks):
        assert len(one) == len(after) and one[-1] == after[0]
    return [*itertools.chain(*(block[:-1] for block in blocks)), blocks[-1][-1]]


def documents_in(tokens):
    """The documents of a stream of which nothing was left out."""
    assert tokens[-1] == EOD
    text = "".join("\0" if token == EOD else chr(token) for token in tokens[:-1])
    return [part.encode("latin-1").decode() for part in text.split("\0")]


@pytest.mark.parametrize("suffix", PACK)
def test_bytes_are_the_file_and_an_end(tmp_path, suffix):
    content = make_text(30).encode()
    # Packed files may follow one another in one.
    packed = PACK[suffix](content[:99]) + PACK[suffix](content[99:])
    (tmp_path / f"a{suffix}").write_bytes(packed)
    info = prepare(tmp_path / "out", tmp_path / f"a{suffix}")
    tokens = [*content, EOD]
    left_out = (len(tokens) - 1) % 8
    assert stream(tmp_path / "out") == tokens[: len(tokens) - left_out]
    split = info["splits"]["train"]
    assert split["documents"] == 1 and split["bytes"] == len(content)
    assert (split["tokens"], split["tokens_left_out"]) == (len(tokens), left_out)
    assert split["examples"] == (len(tokens) - 1) // 8
    assert (info["vocab_size"], info["eod"], info["block"]) == (257, EOD, 8)
    assert info["tokenizer"] == "bytes" and info["files"] == []


def test_files_and_folders_follow_one_another(tmp_path):
    files = {"x/a.txt.gz": gzip.compress(b"first"), "x/b.txt": b"second", "c": b"last"}
    write(tmp_path, files | {"x/.hidden": b"no"})
    info = prepare(tmp_path / "out", tmp_path / "x", tmp_path / "c", text={"block": 1})
    assert documents_in(stream(tmp_path / "out")) == ["first", "second", "last"]
    assert info["splits"]["train"]["documents"] == 3
    assert info["source"]["train"] == [
        {"path": f"{tmp_path}/{name}", "bytes": len(content), "sha256": sha256(content)}
        for name, content in files.items()
    ]


@pytest.mark.parametrize(
    ("document", "content", "expected"),
    [
        ("file", "a\n\nb\n", ["a\n\nb\n"]),
        ("line", "a\n\n b \n  \nc", ["a", " b ", "c"]),
        ("blank", "a\nb\n\n\nc\n \nd", ["a\nb", "c", "d"]),
        ("blank", "\n \n", None),
        # Characters and line ends that parts of a file begin and end within.
        ("file", "a" * (2**20 - 1) + "é", ["a" * (2**20 - 1) + "é"]),
        ("line", "a" * (2**20 - 1) + "\r\nb", ["a" * (2**20 - 1), "b"]),
        ("blank", "\n" * (2**16 - 1) + "a" * 2000 + "\n\nb", ["a" * 2000, "b"]),
    ],
    ids=range(7),
)
def test_documents_are_what_was_asked_for(tmp_path, document, content, expected):
    (tmp_path / "a").write_text(content, newline="")
    text = {"document": document, "block": 1 if len(content) < 99 else 1024}
    if expected is None:
        said = refusal(tmp_path / "out", tmp_path / "a", text=text)
        assert "has 0 tokens, and a block takes 2" in said
        return
    info = prepare(tmp_path / "out", tmp_path / "a", text=text)
    split, plain = info["splits"]["train"], content.replace("\r\n", "\n")
    assert split["documents"] == len(expected)
    assert split["tokens"] == sum(len(each.encode()) + 1 for each in expected)
    assert split["bytes"] == len(plain.encode())
    tokens = [t for each in expected for t in (*each.encode(), EOD)]
    kept = len(tokens) - split["tokens_left_out"]
    assert stream(tmp_path / "out") == tokens[:kept]


LENGTHS = st.sampled_from([1, 2, 2**16 - 1, 2**16, 2**16 + 3])
TEXTS = st.sampled_from(["a", "é漢b", " ", "\t ", "\n", "\r\n", "\r", "\n\n"])
PARTS = st.lists(st.tuples(TEXTS, LENGTHS), min_size=1, max_size=6)


@given(PARTS, st.sampled_from(["file", "line", "blank"]))
@settings(max_examples=8)
def test_documents_are_the_file_however_long_they_are(
    tmp_path_factory, parts, document
):
    folder = tmp_path_factory.mktemp("text")
    content = "".join(text * (n if text.strip() else n % 4) for text, n in parts)
    content = f"{content}{'x' * 300}\n\n{'y' * 300}"
    (folder / "a").write_bytes(content.encode())
    content = io.IncrementalNewlineDecoder(None, True).decode(content, True)
    of_lines = itertools.groupby(content.split("\n"), lambda line: bool(line.strip()))
    expected = {
        "file": [content],
        "line": [line for line in content.split("\n") if line.strip()],
        "blank": ["\n".join(lines) for is_text, lines in of_lines if is_text],
    }[document]
    text = {"document": document, "block": 512}
    (split,) = prepare(folder / "out", folder / "a", text=text)["splits"].values()
    tokens = [t for each in expected for t in (*each.encode(), EOD)]
    assert (split["documents"], split["tokens"]) == (len(expected), len(tokens))
    assert split["bytes"] == len(content.encode())
    assert (found := stream(folder / "out")) == tokens[: len(found)]


@pytest.mark.parametrize(
    ("length", "number", "share", "cut"),
    # The last one where a piece of 655 lines ends.
    [(7, 8, 0.2, 6), (100, 2000, 0.25, 1500), (100, 2000, 0.345, 1310)],
)
def test_the_end_of_a_single_file_is_held_out(tmp_path, length, number, share, cut):
    lines = [f"{k:0{length - 1}}\n" for k in range(number)]
    (tmp_path / "a.txt").write_text("".join(lines))
    text = {"block": 1 if number == 8 else 100}
    prepare(tmp_path / "out", tmp_path / "a.txt", text=text, holdout=share)
    for split, part in (("train", lines[:cut]), ("validation", lines[cut:])):
        assert documents_in(stream(tmp_path / "out", split)) == ["".join(part)]


def test_held_out_documents_are_the_rest(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(f"{n:02}" for n in range(60)))
    text = {"document": "line", "block": 1}
    prepare(tmp_path / "out", tmp_path / "a.txt", text=text, holdout=0.4)
    hashes = [int(sha256(f"a.txt:{n}".encode())[:16], 16) for n in range(60)]
    for split, is_held_out in (("train", False), ("validation", True)):
        assert documents_in(stream(tmp_path / "out", split)) == [
            f"{n:02}" for n in range(60) if (hashes[n] < 0.4 * 2**64) == is_held_out
        ]


SUBWORDS = {"tokenizer": "sentencepiece", "vocab": 300, "document": "line"}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """Subwords that were learnt from a text, and another split of it."""
    folder = tmp_path_factory.mktemp("learnt")
    strange = " two  spaces \n<unk> <|eod|>\0 ☃ \u3000x\n"
    (folder / "a.txt").write_text(make_text(300))
    (folder / "b.txt").write_text(make_text(20, seed=1) + strange)
    sources = f"{folder}/a.txt", f"validation={folder}/b.txt"
    return folder, prepare(folder / "out", *sources, text={**SUBWORDS, "block": 1})


def test_subwords_give_the_text_back_and_are_those_of_train(learnt):
    folder, info = learnt
    model = (folder / "out/tokenizer.model").read_bytes()
    about = {"file": "tokenizer.model", "bytes": len(model), "sha256": sha256(model)}
    assert info["files"] == [about]
    assert verify(folder / "out") == 3 and info["vocab_size"] == 300
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    text = (folder / "b.txt").read_text()
    parts = [processor.encode(each) for each in text.split("\n") if each.strip()]
    tokens = [token for part in parts for token in (*part, info["eod"])]
    assert stream(folder / "out", "validation") == tokens
    lines = [line for line in text.split("\n") if line.strip()]
    assert [processor.decode(part) for part in parts] == lines
    metadata = info["splits"]["validation"]
    assert metadata["documents"] == len(lines)
    assert metadata["bytes"] == len(text.encode())
    # What text is full of is learnt, although it reads like a special token.
    assert processor.encode(" <unk>", out_type=str) == ["▁<", "unk", ">"]


def test_a_model_is_used_again(tmp_path, learnt):
    model = learnt[0] / "out/tokenizer.model"
    (tmp_path / "a.txt").write_text(make_text(30))
    text = {"tokenizer": "sentencepiece", "tokenizer_model": model}
    # Without a train split there is nothing to learn from.
    info = prepare(tmp_path / "out", f"test={tmp_path}/a.txt", text=text)
    assert contents(tmp_path / "out")["tokenizer.model"] == model.read_bytes()
    assert info["vocab_size"] == 300 and "vocab" not in info["options"]
    assert info["options"]["tokenizer_model"] == str(model)
    said = refusal(tmp_path / "no", f"test={tmp_path}/a.txt", text=SUBWORDS)
    assert "learnt from the train split, and there is none" in said


@pytest.mark.parametrize("vocab", [5000, 100])
def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path, vocab):
    (tmp_path / "a.txt").write_text(make_text(50))
    text = {**SUBWORDS, "vocab": vocab}
    message = refusal(tmp_path / "out", tmp_path / "a.txt", text=text)
    assert f"--vocab={vocab}" in message and "--tokenizer=bytes" in message
    assert not (tmp_path / "out").exists()


def test_another_model_file_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text(make_text(30))
    (path := tmp_path / "m.model").write_bytes(b"no model")
    text = {"tokenizer": "sentencepiece", "tokenizer_model": path}
    said = refusal(tmp_path / "out", tmp_path / "a.txt", text=text)
    assert f"--tokenizer-model={path}: it is not a SentencePiece model" in said


BAD = {
    "empty.txt": (b"", "empty file"),
    "latin.txt": ("é".encode("latin-1") * 9, "not UTF-8"),
    "cut.gz": (gzip.compress(b"some text")[:-5], "damaged or truncated"),
    "bomb.gz": (gzip.compress(bytes(2**24)) * 17, "unpacks to far more than its size"),
}


def test_bad_files_are_skipped_counted_and_named(tmp_path):
    good = {"good.txt": make_text(20).encode()}
    write(tmp_path / "x", good | {name: content for name, (content, _) in BAD.items()})
    info = prepare(tmp_path / "out", tmp_path / "x", max_bad="4")
    found = {bad["name"]: bad["reason"] for bad in info["skipped"]["first"]}
    assert found == {name: reason for name, (_, reason) in BAD.items()}
    assert info["splits"]["train"]["bytes"] == len(make_text(20).encode())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.zst", b"x", "a.zst' is not text; unpack it first"),
        ("a.txt", b"short", "has 6 tokens, and a block takes 9"),
        ("none.txt", None, "does not exist; name a file"),
        ("", None, "holds no files; name another folder"),
    ],
)
def test_a_source_without_text_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert message in refusal(tmp_path / "out", tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"tokenizer": "words"}, "--tokenizer=words is none of sentencepiece, bytes"),
        ({"block": 0}, "--block=0"),
        ({"tokenizer": "bytes", "tokenizer_model": Path("m")}, "tokenizer-model need"),
    ],
)
def test_settings_that_make_no_sense_are_refused(text, message):
    with pytest.raises(PrepareError, match=message):
        TextSettings(**text)


def test_stopped_at_any_file_it_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(make_text(200))
    text = {"tokenizer": "sentencepiece", "vocab": 290, "document": "line"}
    settings = {"text": text, "shard_mb": 0.0008, "holdout": 0.2}
    prepare(tmp_path / "whole", tmp_path / "a.txt", workers=1, **settings)
    whole, replace, left = contents(tmp_path / "whole"), os.replace, [0]
    assert len(whole) > 5

    def move(*args, **options):
        """Stops before a file gets its name, some files after the last stop."""
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return replace(*args, **options)

    monkeypatch.setattr(os, "replace", move)
    for sitting in range(100):
        left[0] = 1 + sitting % 6
        try:
            prepare(tmp_path / "out", tmp_path / "a.txt", workers=2, **settings)
            break
        except KeyboardInterrupt:
            assert not (tmp_path / "out" / "dataset.json").exists()
    assert sitting > 3
    assert contents(tmp_path / "out") == whole
