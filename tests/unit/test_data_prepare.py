"""What data/*/prepare.py and data/pipeline/ promise about the files that they write."""

import gzip
import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from support.helpers import ROOT
from support.preparation import (
    CHAR,
    ENVIRONMENT,
    prepare_text,
    read_ids,
    read_texts,
    run_prepare,
    shared,
    small_bpe,
    write_jsonl,
    write_small,
)

from common.errors import UserError
from data.inspect.__main__ import check_files
from data.pipeline.dataset_tokenizer import load_tokenizer
from data.pipeline.documents import BadRecord, hash_content, read_records
from data.pipeline.meta_file import read_meta
from data.pipeline.parts import Settings
from data.pipeline.preparation import prepare
from data.pipeline.workers import Job
from data.quickstart import prepare as quickstart
from data.tokenizers.choice import find_eot
from data.tokenizers.file_tokenizer import FileTokenizer
from data.tokenizers.tokenizer import open_tokenizer

# --- token files ---


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": [[1, 70000]], "val": [[1]]}, "70000"),
        ({"train": [[1, -1]], "val": [[1]]}, "-1"),
        ({"train": [[0]], "val": []}, "the val split of .* would hold no tokens"),
    ],
)
def test_an_id_that_would_wrap_and_an_empty_split_are_refused(tmp_path, splits, message):
    assert np.array([70000]).astype(np.uint16)[0] == 4464  # the silent damage
    with pytest.raises(UserError, match=message):
        write_small(tmp_path, splits=splits, vocab_size=50257)
    assert [path.name for path in tmp_path.iterdir()] == [".prepare.lock"]


@pytest.mark.parametrize("vocab_size, dtype", [(65536, "uint16"), (65537, "uint32"), (151936, "uint32")])
def test_ids_are_two_bytes_while_the_vocabulary_fits(tmp_path, vocab_size, dtype):
    ids = [0, vocab_size - 1]
    meta = write_small(tmp_path, splits={"train": [ids], "val": [np.array(ids)]}, vocab_size=vocab_size)
    assert meta["dtype"] == dtype
    assert read_ids(tmp_path, "train") == read_ids(tmp_path, "val") == ids


def test_meta_describes_the_files_exactly(tmp_path):
    meta = write_small(tmp_path)
    assert json.loads((tmp_path / "meta.json").read_text()) == meta
    assert meta == {
        "format": 1,
        "dtype": "uint16",
        "vocab_size": 2,
        "eot_id": None,
        "tokenizer": {"kind": "char", "name": "char", "chars": "ab"},
        "source": "test",
        "files": {
            "train.bin": {"tokens": 3, "sha256": hashlib.sha256(b"\0\0\1\0\1\0").hexdigest(), "max_id": 1},
            "val.bin": {"tokens": 1, "sha256": hashlib.sha256(b"\1\0").hexdigest(), "max_id": 1},
        },
    }
    nanogpt = pickle.loads((tmp_path / "meta.pkl").read_bytes())
    assert nanogpt == {"vocab_size": 2, "stoi": {"a": 0, "b": 1}, "itos": {0: "a", 1: "b"}}
    names = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert names == {"meta.json", "meta.pkl", "train.bin", "val.bin"}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix not in (".tmp", ".lock")}


def test_a_killed_write_leaves_the_old_dataset(tmp_path):
    write_small(tmp_path)
    before = snapshot(tmp_path)
    script = (
        "import os, signal, sys\n"
        "from data.pipeline.preparation import write_dataset\n"
        "from data.tokenizers.char_tokenizer import CharTokenizer\n"
        "def chunks():\n"
        "    yield [1] * 100_000\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_dataset(sys.argv[1], {'train': chunks()}, 2, CharTokenizer('ab').meta, None, 'killed')\n"
    )
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT)
    assert result.returncode == -9
    assert snapshot(tmp_path) == before
    write_small(tmp_path)  # what the killed run left is no obstacle
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("failing_call", [3, 4, 5, 6])
def test_a_write_that_stops_between_two_files_leaves_no_meta_json(tmp_path, monkeypatch, failing_call):
    write_small(tmp_path)
    replaced = []

    def replace(source, destination):
        replaced.append(destination)
        if len(replaced) == failing_call:
            raise OSError("killed here")
        os.rename(source, destination)

    monkeypatch.setattr("data.pipeline.token_writer.os.replace", replace)
    with pytest.raises(OSError, match="killed here"):
        write_small(tmp_path, splits={"train": [[1]], "val": [[0]]})
    with pytest.raises(UserError, match="no complete dataset"):
        load_tokenizer(tmp_path)


# --- tokenizers ---


def test_a_tokenizer_comes_back_from_its_dataset(tmp_path):
    write_small(tmp_path / "char")
    assert load_tokenizer(tmp_path / "char").encode("ba") == [1, 0]
    assert load_tokenizer(tmp_path / "char").decode([1, 0]) == "ba"
    with pytest.raises(UserError, match="'€'"):
        CHAR.encode("a€")

    source = small_bpe(tmp_path / "source")
    write_small(tmp_path / "bpe", tokenizer=FileTokenizer(source).meta, vocab_size=257)
    source.unlink()  # the dataset has its own copy
    tokenizer = load_tokenizer(tmp_path / "bpe")
    assert tokenizer.decode(tokenizer.encode("héllo\n")) == "héllo\n"
    with open(tmp_path / "bpe" / "tokenizer.json", "a") as file:
        file.write("\n")
    with pytest.raises(UserError, match="has changed"):
        load_tokenizer(tmp_path / "bpe")


NO_NETWORK = {  # prepare.py: (its arguments, what it names)
    "text": (["--input", "a.jsonl", "--tokenizer", "gpt2"], ["TIKTOKEN_CACHE_DIR", "HTTPS_PROXY"]),
    "shakespeare_char": ([], ["--input FILE", "HTTPS_PROXY"]),
    "slimpajama_6b_gpt2": (["--text", "text"], ["--input DIR"]),
}


@pytest.mark.parametrize("name", NO_NETWORK)
def test_without_a_network_one_line_says_what_to_do(tmp_path, name):
    pytest.importorskip("huggingface_hub"), pytest.importorskip("tiktoken")
    proxy = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    env = {**ENVIRONMENT, **proxy, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    if name == "text":
        env["TIKTOKEN_CACHE_DIR"] = str(tmp_path / "empty")
    else:
        shared("tiktoken_cache")
    write_jsonl(tmp_path / "a.jsonl", ["a", "b"])
    (arguments, named), script = NO_NETWORK[name], ROOT / "data" / name / "prepare.py"
    result = run_prepare(name, *arguments, "--output", "out", env=env, cwd=tmp_path, script=str(script))
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert all(word in result.stderr for word in named)


def test_an_unknown_tokenizer_is_named():
    pytest.importorskip("tiktoken")
    with pytest.raises(UserError, match="'gtp2'.*gpt2"):
        open_tokenizer("gtp2")


# --- data/text ---


CHECK_VALUES = {
    "gpt2": ([31373, 995], [15496, 11, 48609, 0], 50256, 50257, "uint16"),
    "llama2": ([22172, 3186], None, 2, 32000, "uint16"),
    "llama3": ([15339, 1917], [9906, 11, 220, 2366, 19, 0], 128001, 128256, "uint32"),
    "qwen3": ([14990, 1879], [9707, 11, 220, 17, 15, 17, 19, 0], 151643, 151669, "uint32"),
}


@pytest.mark.parametrize("name", CHECK_VALUES)
def test_own_text_gets_the_published_ids(tmp_path, name):
    hello, year, eot_id, vocab_size, dtype = CHECK_VALUES[name]
    folder = shared(f"tokenizers/hf/{name}")
    document = write_jsonl(tmp_path / "a.jsonl", ["hello world", "Hello, 2024!"])
    out = tmp_path / "out"
    printed = prepare_text("--input", document, "--tokenizer", folder, "--output", out)
    meta = read_meta(out)
    assert (meta["eot_id"], meta["vocab_size"], meta["dtype"]) == (eot_id, vocab_size, dtype)
    assert read_ids(out, "train") == [*hello, eot_id]
    assert year is None or read_ids(out, "val") == [*year, eot_id]
    assert load_tokenizer(out).decode(hello).strip() == "hello world"
    assert str(out) in printed and "train.py config/quickstart.py" in printed  # two documents are little text


def write_text_dataset(folder: Path, texts: list[str], val_fraction: float, shard_tokens: int) -> list[str]:
    """Each text a file; what train and val decode to. Made twice, as a resume would."""
    (folder / "in").mkdir()
    files = [folder / "in" / f"{i}.txt" for i in range(len(texts))]
    for path, text in zip(files, texts, strict=True):
        path.write_text(text)
    tokenizer = FileTokenizer(small_bpe(folder / "bpe"))
    settings = Settings(256, None, val_fraction, shard_tokens)
    found = []
    for _ in range(2):
        prepare(files, folder / "out", tokenizer, settings, "test", Job())
        found.append([tokenizer.decode(read_ids(folder / "out", split)) for split in ("train", "val")])
        check_files(folder / "out", read_meta(folder / "out"), hashes=True)
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("val_fraction", [1e-9, 1 - 1e-9])
@pytest.mark.parametrize("shard_tokens", [1 << 28, 10])
def test_a_split_that_no_document_fell_to_gets_the_one_with_the_nearest_hash(
    tmp_path, val_fraction, shard_tokens, capsys
):
    texts = ["first text", "second", "and the third", "second", "the last of them"]
    train, val = write_text_dataset(tmp_path, texts, val_fraction, shard_tokens)
    few = val_fraction < 0.5
    nearest = (min if few else max)(texts, key=lambda text: hash_content([text.encode()]))
    lonely, others = (val, train) if few else (train, val)
    assert lonely == f"{nearest}<|endoftext|>" * texts.count(nearest)
    assert others == "".join(f"{text}<|endoftext|>" for text in texts if text != nearest)
    said = "for validation: the one whose text has the smallest" if few else "for training: the one"
    assert f"of 5 documents leaves none {said}" in capsys.readouterr().out


def test_max_tokens_that_end_before_a_document_for_validation_are_refused_with_what_to_change(tmp_path):
    texts = [f"<{i}> text" for i in range(30)]
    texts.sort(key=lambda text: hash_content([text.encode()]), reverse=True)  # those for training come first
    document = write_jsonl(tmp_path / "a.jsonl", texts)
    arguments = (tmp_path / "out", FileTokenizer(small_bpe(tmp_path / "bpe")))
    for most, job in ((40, Job()), (400, Job(resume=False))):
        settings = Settings(256, None, 0.1, 1 << 28, max_tokens=most)
        refused = pytest.raises(
            UserError, match="val split .* more than --max_tokens=40, or another --val_fr"
        )
        with refused if most == 40 else nullcontext():
            prepare([document], *arguments, settings, "", job)


@pytest.mark.parametrize(("max_tokens", "split"), [(None, (900, 101)), (50, (45, 5)), (3, (2, 1))])
@pytest.mark.parametrize("val_fraction", [0.1])
@pytest.mark.parametrize("shard_tokens", [1 << 28, 13])
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_single_document_is_cut_in_two(tmp_path, max_tokens, split, val_fraction, shard_tokens, suffix):
    (tmp_path / "a.txt").write_text("0123456789" * 100)
    write_jsonl(tmp_path / "a.jsonl", ["0123456789" * 100])
    tokenizer = FileTokenizer(small_bpe(tmp_path / "bpe"))
    settings = Settings(256, None, val_fraction, shard_tokens, max_tokens)
    meta = prepare([tmp_path / f"a.{suffix}"], tmp_path / "out", tokenizer, settings, "test", Job())
    train, val = (read_ids(tmp_path / "out", each) for each in ("train", "val"))
    assert (len(train), len(val)) == split and meta["documents"] == 1
    assert tokenizer.decode(train) == ("0123456789" * 100)[: split[0]]
    assert tokenizer.decode(val).endswith("<|endoftext|>") and 256 not in val[:-1]


def test_no_text_at_all_is_refused(tmp_path):
    with pytest.raises(UserError, match="would hold no tokens"):
        write_text_dataset(tmp_path, [""], 0.1, 100)


def test_every_kind_of_file_is_read_in_order(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo".encode())
    write_jsonl(tmp_path / "b.jsonl", ["three", "", "four"])
    five, six, seven, eight = (
        json.dumps({"text": text}).encode() + b"\n" for text in ("five", "six", "seven", "eight")
    )
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(five) + gzip.compress(six))
    # two frames, as zstd -T makes
    (tmp_path / "d.jsonl.zst").write_bytes(zstandard.compress(seven) + zstandard.compress(eight))
    out = tmp_path / "out"
    tokenizer = small_bpe(tmp_path / "bpe")
    inputs = [tmp_path / "a.txt", tmp_path / "*.jsonl*", tmp_path / "b.jsonl"]
    prepare_text("--input", *inputs, "--tokenizer", tokenizer, "--output", out)
    decoded, held_out = read_texts(out, "train"), read_texts(out, "val")
    texts = ["one\ntwo", "three", "four", "five", "six", "seven", "eight"]
    assert decoded == [text for text in texts if text not in held_out]
    assert len(held_out) == 1 and held_out[0] in texts


BAD_LINES = {
    "cut off": b'{"text": "ab',
    "without text": b'{"body": "ab"}',
    "text is a number": b'{"text": 3}',
    "not an object": b"[1, 2]",
    "not UTF-8": b'{"text": "\xff"}',
    "half a surrogate pair": b'{"text": "\\ud800"}',
    "nested deeply": b'{"text": "ab", "other": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


ODD_FIELDS = [b"9" * 5000, b"-" + b"9" * 5000, b"1e99999", b'"\\ud800"', b'{"text": 3}']


@pytest.mark.parametrize("field", ODD_FIELDS, ids=lambda field: field[:12].decode())
def test_a_field_beside_the_text_may_be_any_json(tmp_path, field):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": ' + field + b', "text": "fine"}\n')
    assert list(read_records(path)) == [(1, ["fine"])]


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_corrupt_line_is_a_bad_record_with_its_file_and_number(tmp_path, bad):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + bad + b"\n")
    (_, good), (number, record) = read_records(path)
    assert good == ["fine"] and number == 3
    assert isinstance(record, BadRecord) and re.search(r"a\.jsonl, line 3[ ;]", str(record))
    assert ("nested too deeply" in str(record)) == (len(bad) > 1000)


def test_the_end_of_text_token_is_found_named_or_asked_for(tmp_path):
    tokenizer = FileTokenizer(small_bpe(tmp_path))
    assert find_eot(tokenizer, None) == 256
    assert find_eot(tokenizer, "<|endoftext|>") == 256
    with pytest.raises(UserError, match="<eos>.*--eot"):
        find_eot(tokenizer, "<eos>")
    with pytest.raises(UserError, match="special"):  # text can spell it
        find_eot(FileTokenizer(small_bpe(tmp_path, special=False)), None)


# --- the embedded corpus and Shakespeare ---


def test_quickstart_is_deterministic_and_validates_on_every_20th_file(tmp_path):
    first = quickstart.prepare(tmp_path / "first", corpus_bytes=1_000_000)
    assert first == quickstart.prepare(tmp_path / "second", corpus_bytes=1_000_000)
    assert snapshot(tmp_path / "first") == snapshot(tmp_path / "second")
    assert (first["vocab_size"], first["eot_id"], first["dtype"]) == (4096, 0, "uint16")
    texts = quickstart.read_stdlib(1_000_000)
    train, val = (read_texts(tmp_path / "first", split) for split in ("train", "val"))
    assert val == texts[19::20] and len(train) + len(val) == len(texts)
    assert quickstart.prepare(tmp_path / "first", corpus_bytes=900_000) != first


@pytest.mark.parametrize(
    ("name", "vocab_size", "tokens"),
    [("shakespeare_char", 65, [1_003_854, 111_540]), ("shakespeare", 50257, [301_966, 36_059])],
)
def test_shakespeare_has_nanogpts_counts(tmp_path, name, vocab_size, tokens):
    play = shared("text/tinyshakespeare.txt")
    shared("tiktoken_cache")
    result = run_prepare(name, "--input", play, "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    meta = read_meta(tmp_path)
    assert meta["vocab_size"] == vocab_size
    assert [written["tokens"] for written in meta["files"].values()] == tokens
    if name == "shakespeare_char":
        ids = read_ids(tmp_path, "train") + read_ids(tmp_path, "val")
        assert load_tokenizer(tmp_path).decode(ids) == play.read_text()
