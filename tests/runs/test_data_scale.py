"""What data/slimpajama_*/prepare.py promise: the right ids, the same bytes however the work is done or
interrupted, and nothing lost in silence."""

import gzip
import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from support import warm_python
from support.corpora import HARD, make, tokens_and_meta, write_corpus
from support.helpers import HANG_S, ROOT, TINY
from support.preparation import (
    SHARED_DATA,
    prepare_command,
    read_texts,
    run_prepare,
    shared,
    small_bpe,
    write_jsonl,
)

from common.errors import UserError
from data.pipeline import document_pieces
from data.pipeline.document_pieces import encode_document
from data.pipeline.documents import BadRecord, read_records
from data.tokenizers.families import FAMILIES, open_family
from data.tokenizers.file_tokenizer import FileTokenizer
from data.tokenizers.tokenizer import open_tokenizer
from training.batches.dataset import open_dataset
from training.configuration.keys import TrainConfig


@pytest.fixture
def bpe(tmp_path) -> Path:
    return small_bpe(tmp_path / "bpe")


# --- ids ---


def reference(name: str):
    """An encoder that shares no code with the tokenizers library's file."""
    tiktoken = pytest.importorskip("tiktoken")
    if name == "gpt2":
        shared("tiktoken_cache")
        return tiktoken.get_encoding("gpt2").encode_ordinary
    if name == "llama3":
        from tiktoken.load import load_tiktoken_bpe

        # of llama3/tokenizer.py in Meta's repository llama-models
        pattern = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        ranks = load_tiktoken_bpe(str(shared("tokenizers/llama3/tokenizer.model")))
        return tiktoken.Encoding(
            "l3", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        ).encode_ordinary
    transformers = pytest.importorskip("transformers")
    folder = shared("tokenizers/qwen")
    slow = transformers.Qwen2Tokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    return lambda text: slow.encode(text, add_special_tokens=False, split_special_tokens=True)


@pytest.mark.parametrize("family", ["gpt2", "llama3", "qwen3"])
def test_ids_are_those_of_the_reference_encoder(family, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED_DATA / "tiktoken_cache"))
    folder = shared(f"tokenizers/hf/{family}")
    ours = open_family(FAMILIES[family], None if family == "gpt2" else str(folder))
    encode = reference(family)
    assert [ours.encode(text) for text in HARD] == [encode(text) for text in HARD]
    assert all(ours.token_id(FAMILIES[family].eot) not in ours.encode(text) for text in HARD)


@pytest.mark.parametrize("name", ["hf/gpt2", "hf/llama2", "llama2", "hf/llama3", "hf/qwen3"])
def test_a_document_larger_than_a_piece_gets_the_ids_of_the_whole(name, monkeypatch):
    tokenizer = open_tokenizer(str(shared(f"tokenizers/{name}")))
    text = shared("text/tinyshakespeare.txt").read_text()[:60_000] + "x" * 5000 + HARD[1] * 20
    text += "東京都は、日本の首都です。\n　　人口は約1400万人。\n" * 500  # no spaces between words
    whole = tokenizer.encode(text)
    monkeypatch.setattr(document_pieces, "PIECE_CHARS", 2000)
    for chunks in ([text], [text[i : i + 777] for i in range(0, len(text), 777)]):
        pieces = list(encode_document(chunks, tokenizer.encode))
        assert len(pieces) > 10
        assert np.concatenate(pieces).tolist() == whole


def test_a_document_without_a_place_to_cut_is_a_bad_record(bpe, monkeypatch):
    monkeypatch.setattr(document_pieces, "PIECE_CHARS", 100)
    monkeypatch.setattr(document_pieces, "UNCUT_CHARS", 500)
    with pytest.raises(BadRecord, match="without a place to cut"):
        list(encode_document(["x" * 2000], FileTokenizer(bpe).encode))


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen3"])
def test_a_missing_tokenizer_says_how_to_get_it(family, tmp_path):
    result = run_prepare(f"slimpajama_6b_{family}", "--input", __file__, "--tokenizer", tmp_path / "none")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "save_pretrained('./" + FAMILIES[family].tokenizer + "')" in result.stderr
    assert FAMILIES[family].repository in result.stderr and "pip install transformers" in result.stderr


# --- the same bytes ---


def test_workers_and_parts_change_no_byte_and_no_document_is_lost(tmp_path, bpe):
    files = write_corpus(tmp_path / "in")
    make(files, tmp_path / "one", bpe)
    wanted = tokens_and_meta(tmp_path / "one")
    assert len(wanted) > 6 * 2 + 2 + 6  # files of 3000 tokens: several of a part

    make(files, tmp_path / "two", bpe, workers=2)
    assert tokens_and_meta(tmp_path / "two") == wanted

    texts = [json.loads(line)["text"] for path in files for line in path.read_text().splitlines()]
    train, val = (read_texts(tmp_path / "one", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(texts) and 5 < len(val) < 60
    assert train == [text for text in texts if text not in set(val)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> dict:
    """A command that takes a few seconds, and the bytes that it gives."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "in", files=8, lines=4000)
    tokenizer = shared("tokenizers/hf/gpt2")
    options = ["--input", folder / "in", "--tokenizer", tokenizer, "--val_fraction", 0.1, "--workers", 2]
    assert start_prepare(options, folder / "out").wait(timeout=HANG_S) == 0
    return {"options": options, "bytes": tokens_and_meta(folder / "out")}


def start_prepare(options: list, out: Path) -> subprocess.Popen:
    command = prepare_command("slimpajama_6b_gpt2", *options, "--output", out, part_bytes=400_000)
    return warm_python.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def kill_after_parts(process: subprocess.Popen, out: Path, count: int):
    while len(list(out.glob("parts/*.json"))) < count and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -9
    assert not (out / "meta.json").exists()


@pytest.mark.slow
def test_kill_9_and_resume_gives_the_bytes_of_an_uninterrupted_run(corpus, tmp_path):
    out = tmp_path / "killed"
    kill_after_parts(start_prepare(corpus["options"], out), out, 2)
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("parts/*.json")}
    assert 0 < len(kept) < 8
    assert start_prepare(corpus["options"], out).wait(timeout=HANG_S) == 0
    assert tokens_and_meta(out) == corpus["bytes"]
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in out.glob("parts/*.json")}.items()
    assert not list(out.rglob("*.tmp*"))


# --- bad input ---


def test_bad_records_are_counted_reported_and_capped(tmp_path, bpe, capsys):
    files = write_corpus(tmp_path / "in", files=3)
    for path in files[:2]:
        path.write_text(path.read_text() + '{"text": "cut o\n{"body": 3}\n{"text": ""}\n')
    with pytest.raises(UserError, match="4 bad records in all, more than --max_bad=0") as refusal:
        make(files, tmp_path / "out", bpe)
    assert all(f"{i}.jsonl, line {k}" in str(refusal.value) for i in (0, 1) for k in (41, 42))
    with pytest.raises(UserError, match="4 bad records in all"):
        make(files, tmp_path / "out", bpe, max_bad=3)
    meta = make(files, tmp_path / "out", bpe, max_bad=4)
    assert (meta["documents"], meta["empty"], meta["bad"]) == (120, 2, 4)
    assert "1.jsonl, line 42" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("at_line_end", [True, False])
def test_a_truncated_archive_gives_its_good_documents_and_a_bad_record(tmp_path, suffix, at_line_end):
    line = json.dumps({"text": "word " * 20}).encode() + b"\n"
    path = tmp_path / f"a.jsonl.{suffix}"
    if suffix == "gz":
        path.write_bytes(gzip.compress(line * 100)[:-8])  # all of the text, without its checksum
    else:
        zstandard = pytest.importorskip("zstandard")
        frame = zstandard.ZstdCompressor().compressobj()
        half = frame.compress(line * 50 + (b"" if at_line_end else line[:20]))
        path.write_bytes(half + frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    records = [record for _, record in read_records(path)]
    good = [record for record in records if not isinstance(record, BadRecord)]
    assert len(good) == (100 if suffix == "gz" else 50)
    assert "is damaged after record" in str(records[-1])


def test_a_line_longer_than_a_buffer_is_a_bad_record_and_the_next_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("data.pipeline.documents.LINE_BYTES", 1000)
    path = write_jsonl(tmp_path / "a.jsonl", ["a", "x" * 5000, "b"])
    records = [record for _, record in read_records(path)]
    assert records[0] == ["a"] and records[2:] == [["b"]]
    assert "line 2 is longer than" in str(records[1])


def test_a_text_file_is_read_in_chunks(tmp_path, bpe, monkeypatch):
    monkeypatch.setattr("data.pipeline.documents.CHUNK_CHARS", 7)
    path = tmp_path / "a.txt"
    path.write_bytes(("\ufeff" + "a\r\n\r\nb c\rd\r\n" * 9).encode())
    [(_, chunks)] = read_records(path)
    assert "".join(chunks) == "a\n\nb c\rd\n" * 9


# --- readers ---


def config_of(folder: Path) -> TrainConfig:
    return TrainConfig(**{**TINY, "dataset": str(folder), "vocab_size": 257, "eval_interval": 1})


def test_readers_refuse_a_missing_and_an_extra_file(tmp_path, bpe):
    out = tmp_path / "out"
    make(write_corpus(tmp_path / "in", files=3), out, bpe)
    path, extra = sorted(out.glob("train_*.bin"))[1], out / "train_000009.bin"
    open_dataset(config_of(out), scan=True)
    for old, new, said in ((path, tmp_path / "away", "is missing from"), (tmp_path / "away", path, None)):
        old.rename(new)
        with pytest.raises(UserError, match=said) if said else nullcontext():
            open_dataset(config_of(out), scan=False)
    shutil.copy(path, extra)
    with pytest.raises(UserError, match="is not listed in"):
        open_dataset(config_of(out), scan=False)


def inspect(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "data.inspect", str(folder), *arguments]
    return warm_python.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)


def test_inspect_prints_counts_and_text(tmp_path, bpe):
    meta = make(write_corpus(tmp_path / "in"), tmp_path / "out", bpe)
    result = inspect(tmp_path / "out", "--hash", "--seed", "1", "--samples", "2")
    assert result.returncode == 0, result.stderr
    assert f"documents  {meta['documents']}" in result.stdout and "hashes checked" in result.stdout
    assert result.stdout.count("--- train_") == 2 and result.stdout.count("--- val_") == 2
    assert "x yx y" in result.stdout
    assert result.stdout == inspect(tmp_path / "out", "--hash", "--seed", "1", "--samples", "2").stdout


def test_inside_data_the_inspect_of_the_standard_library_is_imported():
    command = [sys.executable, "-c", "import inspect; print(inspect.signature(print), inspect.__file__)"]
    result = warm_python.run(command, cwd=ROOT / "data", capture_output=True, text=True, timeout=HANG_S)
    assert result.returncode == 0, result.stderr
    assert str(ROOT) not in result.stdout and "inspect.py" in result.stdout


@pytest.mark.parametrize("path", sorted(ROOT.glob("data/*/prepare.py")), ids=lambda path: path.parent.name)
def test_every_prepare_runs_from_its_folder_and_from_the_root(path):
    name = path.parent.name
    for cwd, script in ((path.parent, "prepare.py"), (ROOT, f"data/{name}/prepare.py")):
        result = run_prepare(name, "--help", cwd=cwd, script=script)
        assert result.returncode == 0 and "--output" in result.stdout, result.stderr
        assert ("--shard_tokens" in result.stdout) == (
            name.startswith("slimpajama") or name in ("text", "mds", "chat")
        )
