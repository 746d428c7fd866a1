"""Text becomes blocks from which its tokens, and its text, can be had back."""

import bz2
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from prepare_cases import contents, records

from echo_jax.data.prepare import (
    PrepareError,
    Settings,
    TextSettings,
    documents,
    prepare_text,
    workspace,
)
from echo_jax.data.prepare.blocks import BlockStream, token_dtype
from echo_jax.data.prepare.documents import Piece, pieces
from echo_jax.data.prepare.job import is_held_out
from echo_jax.data.prepare.tokenizer import (
    ByteTokenizer,
    SubwordTokenizer,
    sample,
    train_subwords,
)
from echo_jax.data.sources.prepared import PreparedError, read_info, unpack, verify
from echo_jax.files import compressed

PACK = {".txt": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
WORDS = ["the", "cat", "sat", "on a", "mat", "and an", "<unk>", "=", "é", "漢字", "\t"]
EOD = 256


def make_text(num_lines, seed=0):
    rng = np.random.default_rng(seed)
    lines = [" ".join(rng.choice(WORDS, rng.integers(9))) for _ in range(num_lines)]
    return "\n".join(lines) + "\n"


def prepare(out, *sources, text=None, **settings):
    text = {"tokenizer": "bytes", "block": 8, **(text or {})}
    return prepare_text(sources, Settings(out=out, **settings), TextSettings(**text))


def refusal(out, *sources, **kwargs):
    with pytest.raises(PrepareError) as caught:
        prepare(out, *sources, **kwargs)
    with pytest.raises(PreparedError):
        read_info(out)
    return str(caught.value)


def stream(found, dtype="<u2"):
    """The tokens that blocks were cut from, but those that were left out."""
    blocks = [np.frombuffer(record["tokens"], dtype) for record in found]
    for one, after in itertools.pairwise(blocks):
        assert len(one) == len(after) and one[-1] == after[0]
    return [*np.concatenate([block[:-1] for block in blocks]), blocks[-1][-1]]


def texts(path, document):
    """The documents of a file, put together again."""
    whole = [[]]
    for piece in pieces(path, document):
        assert piece.document == len(whole) - 1
        whole[-1].append(piece.text)
        if piece.ends:
            whole.append([])
    assert "".join(whole.pop()) == ""
    return ["".join(parts) for parts in whole]


@pytest.mark.parametrize("suffix", PACK)
def test_bytes_are_the_file_and_an_end(tmp_path, suffix):
    content = make_text(30).encode()
    (tmp_path / f"a{suffix}").write_bytes(PACK[suffix](content))
    info = prepare(tmp_path / "out", f"{tmp_path}/a{suffix}")
    tokens = [*content, EOD]
    left_out = (len(tokens) - 1) % 8
    assert (
        stream(records(tmp_path / "out", "train")) == tokens[: len(tokens) - left_out]
    )
    split = info["splits"]["train"]
    assert split["documents"] == 1 and split["bytes"] == len(content)
    assert (split["tokens"], split["tokens_left_out"]) == (len(tokens), left_out)
    assert split["examples"] == (len(tokens) - 1) // 8
    assert (info["vocab_size"], info["eod"], info["block"]) == (257, EOD, 8)
    assert info["tokenizer"] == "bytes" and info["files"] == []


def test_files_and_folders_follow_one_another(tmp_path):
    (tmp_path / "x").mkdir()
    for name in ("b.txt", "a.txt.gz", ".hidden"):
        (tmp_path / "x" / name).write_bytes(
            gzip.compress(b"first") if ".gz" in name else b"second"
        )
    (tmp_path / "c").write_bytes(b"last")
    info = prepare(
        tmp_path / "out", f"{tmp_path}/x", f"{tmp_path}/c", text={"block": 1}
    )
    tokens = [*b"first", EOD, *b"second", EOD, *b"last", EOD]
    assert stream(records(tmp_path / "out", "train")) == tokens
    assert info["splits"]["train"]["documents"] == 3
    for metadata, path in zip(
        info["source"]["train"],
        [tmp_path / "x" / "a.txt.gz", tmp_path / "x" / "b.txt", tmp_path / "c"],
        strict=True,
    ):
        content = path.read_bytes()
        assert metadata == {
            "path": str(path),
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }


@pytest.mark.parametrize(
    ("document", "content", "expected"),
    [
        ("file", "a\n\nb\n", ["a\n\nb\n"]),
        ("file", " ", [" "]),
        ("line", "a\n\n b \n  \nc", ["a", " b ", "c"]),
        ("line", "a\r\nb\rc\n", ["a", "b", "c"]),
        ("line", "\n\n", []),
        ("blank", "a\nb\n\n\nc\n \nd", ["a\nb", "c", "d"]),
        ("blank", "\n\na\n\n", ["a"]),
        ("blank", "\n \n", []),
    ],
)
def test_documents_are_what_was_asked_for(tmp_path, document, content, expected):
    (tmp_path / "a").write_text(content, newline="")
    assert texts(tmp_path / "a", document) == expected


CONTENTS = st.text(st.sampled_from("ab é漢\t\r\n"), max_size=120)


@given(content=CONTENTS, chunk=st.integers(1, 9), chars=st.integers(2, 20))
@settings(max_examples=150)
def test_documents_do_not_depend_on_how_they_are_read(
    tmp_path_factory, content, chunk, chars
):
    path = tmp_path_factory.mktemp("text") / "a"
    path.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compressed, "_CHUNK_BYTES", chunk)
        patch.setattr(documents, "_PIECE_CHARS", chars)
        content = io.IncrementalNewlineDecoder(None, True).decode(content, True)
        assert texts(path, "file") == [content]
        for document in documents.DOCUMENTS:
            found = sum(piece.bytes for piece in pieces(path, document))
            assert found == len(content.encode())
        assert all(len(piece.text) <= chars for piece in pieces(path, "file"))
        lines = [line for line in content.split("\n") if line.strip()]
        found = texts(path, "line")
        # A long run of blanks is text, because more may follow it.
        assert [line for line in found if line.strip()] == lines
        assert all(len(line) >= chars for line in found if not line.strip())
        if chars == 20:
            joined = "".join("".join(texts(path, "blank")).split())
            assert joined == "".join(content.split())


@given(
    lengths=st.lists(st.integers(0, 12), max_size=12),
    block=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 4), min_size=1, max_size=5),
)
@settings(max_examples=200)
def test_blocks_are_the_stream_wherever_it_is_left_and_taken_up(lengths, block, cuts):
    source = [
        Piece(i, "x" * length, ends=i % 3 > 0) for i, length in enumerate(lengths)
    ]
    expected = []
    for piece in source:
        expected += [ord("x")] * len(piece.text) + [EOD] * piece.ends
    found, note = [], None
    while True:
        # Every sitting starts anew from what the one before has noted.
        note = json.loads(json.dumps(note))
        blocks = BlockStream(iter(source), ByteTokenizer(), block, 1, note)
        found += blocks.blocks(cuts[len(found) % len(cuts)] + 1)
        note = blocks.note()
        blocks.close()
        if blocks.is_done:
            break
    number = max(0, (len(expected) - 1) // block)
    assert len(found) == number
    for k, record in enumerate(found):
        tokens = np.frombuffer(unpack(record)["tokens"], "<u2").tolist()
        assert tokens == expected[k * block : (k + 1) * block + 1]
    assert blocks.tokens == len(expected)
    assert blocks.documents == sum(piece.ends for piece in source)
    assert blocks.bytes == sum(lengths)


def test_ids_are_stored_as_small_as_they_fit():
    assert token_dtype(2**16) == np.dtype("<u2")
    assert token_dtype(2**16 + 1) == np.dtype("<u4")


@pytest.fixture(scope="module")
def model():
    return train_subwords(make_text(400).split("\n"), 300)


def test_subwords_give_the_text_back(model):
    tokenizer = SubwordTokenizer(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in (make_text(50, seed=1), " two  spaces ", "<unk> <|eod|>\n\0 ☃ \u3000x"):
        ids = tokenizer.encode(text)
        assert processor.decode(ids.tolist()) == text
        assert tokenizer.eod not in ids and ids.max() < tokenizer.vocab_size == 300
    # What text is full of is learnt, although it reads like a special token.
    assert processor.encode(" <unk>", out_type=str) == ["▁<", "unk", ">"]


def test_training_is_the_same_each_time(model):
    assert train_subwords(make_text(400).split("\n"), 300) == model
    assert train_subwords(make_text(400, seed=1).split("\n"), 300) != model


@pytest.mark.parametrize("vocab", [5000, 100])
def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path, vocab):
    (tmp_path / "a.txt").write_text(make_text(50))
    message = refusal(
        tmp_path / "out",
        f"{tmp_path}/a.txt",
        text={"tokenizer": "sentencepiece", "vocab": vocab},
    )
    assert f"--vocab={vocab}" in message and "--tokenizer=bytes" in message
    assert not (tmp_path / "out").exists()


def test_all_splits_have_the_subwords_of_train(tmp_path):
    (tmp_path / "a.txt").write_text(make_text(300))
    (tmp_path / "b.txt").write_text(make_text(20, seed=1))
    out = tmp_path / "out"
    text = {"tokenizer": "sentencepiece", "vocab": 300, "document": "line"}
    info = prepare(out, f"{tmp_path}/a.txt", f"validation={tmp_path}/b.txt", text=text)
    learnt = (out / "tokenizer.model").read_bytes()
    assert info["files"] == [
        {
            "file": "tokenizer.model",
            "bytes": len(learnt),
            "sha256": hashlib.sha256(learnt).hexdigest(),
        }
    ]
    assert verify(out) == 3
    tokenizer = SubwordTokenizer(learnt)
    assert learnt == train_subwords(make_text(300).split("\n"), 300)
    lines = [line for line in make_text(20, seed=1).split("\n") if line.strip()]
    tokens = []
    for line in lines:
        tokens += [*tokenizer.encode(line), info["eod"]]
    kept = len(tokens) - (len(tokens) - 1) % 8
    assert stream(records(out, "validation")) == tokens[:kept]
    metadata = info["splits"]["validation"]
    assert metadata["documents"] == len(lines)
    assert metadata["bytes"] == len(make_text(20, seed=1).encode())


def test_a_model_is_used_again(tmp_path, model):
    (tmp_path / "m.model").write_bytes(model)
    (tmp_path / "a.txt").write_text(make_text(30))
    text = {"tokenizer": "sentencepiece", "tokenizer_model": tmp_path / "m.model"}
    # Without a train split there is nothing to learn from.
    info = prepare(tmp_path / "out", f"test={tmp_path}/a.txt", text=text)
    assert contents(tmp_path / "out")["tokenizer.model"] == model
    assert info["vocab_size"] == 300 and "vocab" not in info["options"]
    assert info["options"]["tokenizer_model"].endswith("m.model")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"no model", "is no sentencepiece model"), (None, "no end-of-sentence piece")],
)
def test_another_model_file_is_refused(tmp_path, content, message):
    (tmp_path / "a.txt").write_text(make_text(30))
    if content is None:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(make_text(300).split("\n")),
            model_prefix=str(tmp_path / "m"),
            model_type="bpe",
            byte_fallback=True,
            vocab_size=290,
            eos_id=-1,
            minloglevel=2,
        )
    else:
        (tmp_path / "m.model").write_bytes(content)
    text = {"tokenizer": "sentencepiece", "tokenizer_model": tmp_path / "m.model"}
    said = refusal(tmp_path / "out", f"{tmp_path}/a.txt", text=text)
    assert message in said and "--tokenizer-model=" in said


def test_subwords_need_a_train_split(tmp_path):
    (tmp_path / "a.txt").write_text(make_text(30))
    text = {"tokenizer": "sentencepiece"}
    said = refusal(tmp_path / "out", f"test={tmp_path}/a.txt", text=text)
    assert "learnt from the train split, and there is none" in said


def test_a_sample_is_spread_over_the_text_and_keeps_its_order():
    lines = [f"line {number:04}" for number in range(1000)]
    taken = sample(lines, max_bytes=1800)
    assert len(taken) == 200 and taken == sorted(set(taken))
    numbers = [lines.index(line) for line in taken]
    # A quarter of 200 draws, within five standard deviations.
    assert all(
        abs(np.histogram(numbers, 4, (0, 1000))[0][quarter] - 50) < 31
        for quarter in range(4)
    )
    assert sample(iter(lines), max_bytes=1800) == taken
    assert sample(lines, max_bytes=9000) == lines


def test_held_out_documents_are_the_rest(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(f"{n:02}" for n in range(60)))
    text = {"document": "line", "block": 3}
    prepare(tmp_path / "out", f"{tmp_path}/a.txt", text=text, holdout=0.4)
    found = {}
    for split in ("train", "validation"):
        tokens = stream(records(tmp_path / "out", split))
        # A document is two digits and an end, and a block as long: one is left out.
        numbers = np.reshape(tokens[:-1], (-1, 3))
        assert (numbers[:, 2] == EOD).all()
        found[split] = {int(bytes(n[:2].tolist())) for n in numbers}
    held_out = {n for n in range(60) if is_held_out(f"a.txt:{n}", 0.4)}
    assert found["validation"] == held_out - {max(held_out)}
    assert found["train"] == {*range(59)} - held_out


@pytest.mark.parametrize(
    ("document", "tokens", "num_documents"),
    # By hand: the bytes of documents, and an end for each.
    [("file", 18 + 1, 1), ("line", 10 + 4, 4), ("blank", 12 + 2, 2)],
)
def test_bytes_are_those_of_the_file_whatever_a_document_is(
    tmp_path, document, tokens, num_documents
):
    content = b"\nab\ncd\n\n \nefg\nhij\n"
    (tmp_path / "a.txt").write_bytes(content)
    info = prepare(
        tmp_path / "out", f"{tmp_path}/a.txt", text={"document": document, "block": 1}
    )
    split = info["splits"]["train"]
    assert split["bytes"] == 18
    assert (split["tokens"], split["documents"]) == (tokens, num_documents)


@pytest.mark.parametrize("document", documents.DOCUMENTS)
def test_held_out_bytes_and_the_others_are_those_of_the_file(tmp_path, document):
    content = make_text(300, seed=3).encode()
    (tmp_path / "a.txt").write_bytes(content)
    text = {"document": document, "block": 3}
    info = prepare(tmp_path / "out", f"{tmp_path}/a.txt", text=text, holdout=0.3)
    splits = info["splits"]
    assert sum(split["bytes"] for split in splits.values()) == len(content)


@pytest.mark.parametrize(("share", "num_lines"), [(0.25, 2), (0.2, 2), (0.125, 1)])
def test_the_end_of_a_single_file_is_held_out(tmp_path, share, num_lines):
    lines = [f"line {k}\n".encode() for k in range(8)]
    (tmp_path / "a.txt").write_bytes(b"".join(lines))
    prepare(tmp_path / "out", f"{tmp_path}/a.txt", text={"block": 1}, holdout=share)
    kept = stream(records(tmp_path / "out", "train"))
    held_out = stream(records(tmp_path / "out", "validation"))
    assert kept == [*b"".join(lines[: 8 - num_lines]), EOD]
    assert held_out == [*b"".join(lines[8 - num_lines :]), EOD]


@given(content=CONTENTS.filter(bool), at=st.integers(0, 300), chars=st.integers(2, 20))
@settings(max_examples=150)
def test_a_cut_loses_nothing(tmp_path_factory, content, at, chars):
    path = tmp_path_factory.mktemp("text") / "a"
    path.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_PIECE_CHARS", chars)
        parts = [
            [*documents.cut(pieces(path, "file"), at, is_before=is_before)]
            for is_before in (True, False)
        ]
    content = io.IncrementalNewlineDecoder(None, True).decode(content, True)
    before, after = ("".join(piece.text for piece in part) for part in parts)
    assert before + after == content
    assert len(before.encode()) <= max(at, 4)
    assert all(not part or part[-1].ends for part in parts)
    assert sum(piece.ends for piece in parts[0]) <= 1


BAD = {
    "empty.txt": (b"", "empty file"),
    "latin.txt": ("é".encode("latin-1") * 9, "not UTF-8"),
    "cut.txt": ("é".encode()[:1], "not UTF-8"),
    "cut.gz": (gzip.compress(b"some text")[:-5], "damaged or truncated"),
    "cut.xz": (lzma.compress(b"some text")[:-5], "damaged or truncated"),
    "none.bz2": (b"BZh9 this is not", "damaged or truncated"),
}


def test_bad_files_are_skipped_counted_and_named(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "good.txt").write_text(make_text(20))
    for name, (content, _) in BAD.items():
        (tmp_path / "x" / name).write_bytes(content)
    assert "more than 0 of 7 are bad: train: 'cut.gz' (damaged or truncated)" in (
        refusal(tmp_path / "out", f"{tmp_path}/x")
    )
    info = prepare(tmp_path / "out", f"{tmp_path}/x", max_bad="6")
    found = {bad["name"]: bad["reason"] for bad in info["skipped"]["first"]}
    assert found == {name: reason for name, (_, reason) in BAD.items()}
    assert info["splits"]["train"]["bytes"] == len(make_text(20).encode())


def test_a_bomb_is_bad(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "_ANY_RATIO_BYTES", 2**20)
    (tmp_path / "a.gz").write_bytes(gzip.compress(b" " * 2**22))
    said = refusal(tmp_path / "out", f"{tmp_path}/a.gz")
    assert "'a.gz' (unpacks to far more than its size)" in said


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.zst", b"x", "a.zst' is no text; unpack it first"),
        ("a.zip", b"x", "unpack it first"),
        ("a.txt", b"short", "has 6 tokens, and a block takes 9"),
        ("b.txt", b"", "more than 0 of 1 are bad"),
    ],
)
def test_a_source_without_text_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert message in refusal(tmp_path / "out", f"{tmp_path}/{name}")


def test_a_missing_source_is_refused(tmp_path):
    assert "no such file" in refusal(tmp_path / "out", f"{tmp_path}/nothing.txt")
    (tmp_path / "empty").mkdir()
    assert "there is no file in" in refusal(tmp_path / "out", f"{tmp_path}/empty")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"tokenizer": "words"}, "--tokenizer=words is none of sentencepiece, bytes"),
        ({"document": "page"}, "--document=page is none of file, line, blank"),
        ({"block": 0}, "--block=0"),
        (
            {"tokenizer": "bytes", "tokenizer_model": Path("m")},
            "--tokenizer-model needs",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(text, message):
    with pytest.raises(PrepareError, match=message):
        TextSettings(**text)


@pytest.mark.parametrize("tokenizer", ["bytes", "sentencepiece"])
def test_stopped_at_any_shard_it_goes_on_to_the_same_bytes(
    tmp_path, monkeypatch, tokenizer
):
    (tmp_path / "a.txt").write_text(make_text(200))
    text = {"tokenizer": tokenizer, "vocab": 290, "document": "line"}
    settings = {"text": text, "shard_mb": 0.0008, "holdout": 0.2}
    prepare(tmp_path / "whole", f"{tmp_path}/a.txt", workers=1, **settings)
    whole = contents(tmp_path / "whole")
    assert len(whole) > 5
    stops_at = 0
    written = []
    write = workspace.Workspace.write_shard

    def write_some(self, split, number, made, rest):
        if len(written) == stops_at:
            # In the midst of a shard.
            write(self, split, number, [next(iter(made))], rest)
            (self._work / f"{split}-{number:05}.json").unlink()
            raise KeyboardInterrupt
        written.append((split, number))
        return write(self, split, number, made, rest)

    monkeypatch.setattr(workspace.Workspace, "write_shard", write_some)
    for sitting in range(100):
        stops_at = len(written) + 1 if sitting % 3 else len(written)
        if sitting > 30:
            stops_at = -1
        try:
            prepare(tmp_path / "out", f"{tmp_path}/a.txt", workers=2, **settings)
            break
        except KeyboardInterrupt:
            assert not (tmp_path / "out" / "dataset.json").exists()
    assert sitting > 3 and len(written) == len({*written})
    assert contents(tmp_path / "out") == whole


@pytest.mark.skipif(
    "ECHO_JAX_DATA" not in os.environ,
    reason="ECHO_JAX_DATA names no folder with the real data",
)
def test_real_text_comes_back_to_the_byte(tmp_path, monkeypatch):
    path = Path(os.environ["ECHO_JAX_DATA"]) / "wikitext2" / "valid.txt.xz"
    out = tmp_path / "out"
    text = {"tokenizer": "sentencepiece", "vocab": 1000, "block": 128}
    # A part of it is enough to learn from.
    monkeypatch.setattr(sample, "__defaults__", (200_000,))
    info = prepare(out, f"train={path}", text=text)
    tokens = stream(records(out, "train"))
    processor = sentencepiece.SentencePieceProcessor(
        model_file=str(out / "tokenizer.model")
    )
    whole = lzma.decompress(path.read_bytes()).decode()
    decoded = processor.decode([int(token) for token in tokens[:-1]])
    assert whole.startswith(decoded.rstrip("\ufffd"))
    assert len(whole) - len(decoded) < 128 * 20
    assert info["splits"]["train"]["bytes"] == 1_121_681
