"""MDS shards that the mosaicml-streaming package wrote become a dataset; damaged and hostile ones do not."""

import hashlib
import json
import shutil
import struct
import sys

import numpy as np
import pytest
from support.helpers import ROOT
from support.mds_fixtures import T, texts, tokens
from support.preparation import run_parts_here, small_bpe

from common.errors import UserError
from data.pipeline import mds, preparation
from data.pipeline.bad_records import BadRecord
from data.pipeline.mds import (
    Columns,
    checked_lengths,
    decode_numbers,
    find_shards,
    read_tokens,
    wrong_numbers,
)
from data.pipeline.meta_file import read_meta
from data.pipeline.token_files import looks_wider
from data.pipeline.verified import MEMORY

SHARDS = ROOT / "tests" / "support" / "mds"
SAMPLES = [(ids.tolist(), lengths.tolist()) for ids, lengths in tokens("int64", "int64")]


def read(folder, tokens="input_ids", lengths="attention_mask", split_at=None) -> list:
    """(ids, lengths of the documents in them) of each sample, or why it is a bad record."""
    columns = {column: wrong_numbers for column in (tokens, lengths) if column}
    samples = [
        sample
        for path in find_shards([str(folder)], columns)
        for _, sample in read_tokens(path, Columns(tokens, lengths, split_at, "int64"))
    ]
    return [
        str(sample)
        if isinstance(sample, BadRecord)
        else (np.concatenate(sample).tolist(), list(map(len, sample)))
        for sample in samples
    ]


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """prepare(folder of shards, *flags): data/mds/prepare.py in this process; gives the dataset's folder."""
    monkeypatch.setattr(preparation, "run_parts", run_parts_here)
    monkeypatch.setattr(mds, "read_index", mds.read_index.__wrapped__)
    bpe = small_bpe(tmp_path / "bpe")
    script = ROOT / "data" / "mds" / "prepare.py"

    def main(folder, *flags, output="dataset"):
        out = tmp_path / output
        argv = [str(script), "--input", str(folder), "--tokenizer", str(bpe), "--output", str(out)]
        monkeypatch.setattr(sys, "argv", [*argv, "--workers", "1", "--val_fraction", "0.3", *flags])
        namespace = {"__name__": "prepare", "__file__": str(script)}
        exec(compile(script.read_text(), str(script), "exec"), namespace)
        namespace["main"]()
        return out

    return main


IDS = ("--tokens", "input_ids", "--lengths", "attention_mask")


# --- what the package wrote ---


@pytest.mark.parametrize("name", ["ndarray_zstd", "ndarray_dynamic", "ndarray_shape"])
def test_ids_and_document_lengths_are_those_that_were_written(name):
    assert read(SHARDS / name) == SAMPLES


def test_a_column_of_bytes_holds_ids_of_the_stated_type():
    assert [ids for ids, _ in read(SHARDS / "bytes", "tokens", None)] == [ids for ids, _ in SAMPLES]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
def test_a_narrower_type_than_that_of_the_ids_is_refused_before_anything_is_written(prepare, tmp_path, dtype):
    with pytest.raises(UserError, match=f"if ids are {dtype}, so they have more bits: .* --bytes_dtype"):
        prepare(SHARDS / "bytes", "--tokens", "tokens", "--bytes_dtype", dtype)
    assert not list((tmp_path / "dataset").glob("*.bin*"))


@pytest.mark.parametrize("wide", ["<u4", "<i8"])
def test_raw_ids_of_a_wider_type_are_recognized_and_others_are_not(wide):
    rng = np.random.default_rng(0)
    for vocabulary in (5, 250, 50_257, 151_936):
        ids = rng.integers(0, vocabulary, 1000)
        narrow = "<u2" if vocabulary < 65_536 else "<u4"
        assert not looks_wider(ids.astype(narrow))
        assert looks_wider(np.frombuffer(ids.astype(wide).tobytes(), "<u2"))
    assert looks_wider(np.array([5, 0, 0, 0, 6, 0, 0, 0]))


def test_few_samples_leave_no_split_empty(prepare):
    folder = prepare(SHARDS / "ndarray_zstd", *IDS, "--val_fraction", "0.000001")
    tokens = {name: file["tokens"] for name, file in read_meta(folder)["files"].items()}
    assert tokens == {"train.bin": T * (len(SAMPLES) - 1), "val.bin": T}


def test_one_sample_cannot_be_split_which_is_said_before_it_is_written(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "data.pipeline.part_documents.read_tokens", lambda *arguments: iter([(0, [np.arange(T)])])
    )
    monkeypatch.setattr(preparation, "run_parts", lambda *arguments: pytest.fail("it was written"))
    with pytest.raises(UserError, match="one text only .1 documents or samples.*none can be for validation"):
        prepare(SHARDS / "ndarray_shape", *IDS)


def test_without_lengths_documents_end_after_each_end_of_text_and_with_the_sample():
    split_at = SAMPLES[0][0][3]
    for ids, lengths in read(SHARDS / "bytes", "tokens", None, split_at):
        ends = np.cumsum(lengths)
        assert ends[-1] == T
        assert [i + 1 for i, token in enumerate(ids[:-1]) if token == split_at] == ends[:-1].tolist()


def test_ids_become_token_files_with_lengths_beside_them(prepare):
    folder = prepare(SHARDS / "ndarray_zstd", *IDS)
    meta = read_meta(folder)
    assert (meta["format"], meta["eot_id"], meta["documents"]) == (2, None, 4 * len(SAMPLES))
    found = []
    for split in ("train", "val"):
        ids = np.fromfile(folder / f"{split}.bin", "<u2")
        lengths = np.fromfile(folder / f"{split}.bin.lengths", "<u4")
        said = meta["files"][f"{split}.bin"]["lengths"]
        assert lengths.sum() == len(ids) == meta["files"][f"{split}.bin"]["tokens"]
        assert said["documents"] == len(lengths) and said["longest"] == lengths.max()
        assert said["sha256"] == hashlib.sha256((folder / f"{split}.bin.lengths").read_bytes()).hexdigest()
        rows = zip(ids.reshape(-1, T).tolist(), lengths.reshape(-1, 4).tolist(), strict=True)
        found += list(rows)
        assert found, split
    assert sorted(found) == sorted(SAMPLES)
    assert {"train.bin.lengths", "val.bin.lengths"} <= json.loads((folder / MEMORY).read_text()).keys()


def test_the_same_command_keeps_the_files_and_makes_a_lost_file_of_lengths_again(prepare):
    folder = prepare(SHARDS / "ndarray_dynamic", *IDS)
    before = {path.name: path.read_bytes() for path in folder.glob("*.bin*")}
    for lost in (None, "train.bin.lengths"):
        if lost:
            (folder / lost).unlink()
        assert prepare(SHARDS / "ndarray_dynamic", *IDS) == folder
        assert before == {path.name: path.read_bytes() for path in folder.glob("*.bin*")}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (IDS[:2], "lengths, split_at"),
        (("--tokens", "attention_mask", "--lengths", "input_ids"), "tokens, lengths"),
        ((*IDS, "--bytes_dtype", "int32"), "bytes_dtype"),
    ],
)
def test_other_columns_are_another_dataset(prepare, flags, named):
    prepare(SHARDS / "ndarray_zstd", *IDS)
    with pytest.raises(UserError, match=f"was begun with another {named}; pass what it was begun with"):
        prepare(SHARDS / "ndarray_zstd", *flags)


@pytest.mark.parametrize(
    ("flags", "most", "total"),
    [(("--shard_tokens", "50"), 50, T * len(SAMPLES)), (("--max_tokens", "203"), 203, 203)],
)
def test_ids_and_lengths_are_cut_alike_where_a_file_ends(prepare, flags, most, total):
    folder = prepare(SHARDS / "ndarray_shape", *IDS, *flags)
    files = read_meta(folder)["files"]
    assert sum(file["tokens"] for file in files.values()) == total and len(files) >= total / most
    for name, file in files.items():
        lengths = np.fromfile(folder / f"{name}.lengths", "<u4")
        assert lengths.sum() == file["tokens"] <= most and lengths.min() > 0


def test_text_is_tokenized_and_ends_with_end_of_text(prepare):
    folder = prepare(SHARDS / "text")
    meta = read_meta(folder)
    assert (meta["format"], meta["eot_id"], meta["documents"]) == (1, 256, 40)
    assert not list(folder.glob("*.lengths"))
    assert sum(file["tokens"] for file in meta["files"].values()) == sum(len(t.encode()) + 1 for t in texts())


# --- damaged and hostile ---


def copy_of(tmp_path, name="ndarray_dynamic"):
    return shutil.copytree(SHARDS / name, tmp_path / "shards")


def change_index(folder, change):
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


def rewrite(folder, change):
    """Changes the bytes of the first shard, and its size and hash in index.json: as an attacker would."""
    path = folder / "shard.00000.mds"
    content = bytearray(path.read_bytes())
    changed = change(content)
    content = content if changed is None else changed
    path.write_bytes(content)
    info = {"basename": path.name, "bytes": len(content), "hashes": {}}
    change_index(folder, lambda index: index["shards"][0].update(raw_data=info))


def put(content: bytearray, at: int, *numbers: int) -> None:
    content[at : at + 4 * len(numbers)] = struct.pack(f"<{len(numbers)}I", *numbers)


FILES = {
    "truncated": (lambda folder: shorten(folder / "shard.00000.mds", 40), "bytes, index.json says"),
    "changed": (lambda folder: flip(folder / "shard.00000.mds"), "the sha1 of shard.00000.mds is"),
    "missing": (lambda folder: (folder / "shard.00001.mds").unlink(), "is missing: the folder was not"),
    "no index": (lambda folder: (folder / "index.json").unlink(), "No such file.*name the folder"),
    "no json": (lambda folder: (folder / "index.json").write_text("{"), "no index of MDS shards"),
}
CONTENT = {
    "huge count": (lambda c: put(c, 0, 2**32 - 1), "4,294,967,295 samples"),
    "empty": (lambda c: b"", "says that it has 0 samples"),
    "no room for offsets": (lambda c: c[:10], "cannot hold the offsets"),
    "offset outside": (lambda c: put(c, 8, 2**31), "lead outside of it"),
    "offsets backwards": (lambda c: put(c, 8, 30), "lead outside of it, or backwards"),
    "column outside": (
        lambda c: put(c, struct.unpack_from("<I", c, 4)[0], 2**31),
        "columns of sample 0 take",
    ),
    "id beyond": (lambda c: put(c, len(c) - 8, 70_000, 0), "token id 70000 is outside the vocabulary"),
}
SHARD_FIELDS = {
    "version": ({"version": 3}, "format 'mds', and 'mds' of version 2"),
    "format": ({"format": "jsonl"}, "format 'jsonl'"),
    "name outside": ({"raw_data": {"basename": "../x.mds", "bytes": 1}}, "leads out of the folder"),
    "absolute name": ({"raw_data": {"basename": "/etc/passwd", "bytes": 1}}, "leads out of the folder"),
    "pickle": ({"column_encodings": ["pkl", "ndarray"]}, "can run any code and is never read"),
    "unknown encoding": ({"column_encodings": ["ndarray", "cheese"]}, "encoding 'cheese'"),
    "floats": ({"column_encodings": ["ndarray", "ndarray:float32"]}, "whole numbers"),
    "no such column": ({"column_names": ["attention_mask", "words"]}, "has no column 'input_ids'"),
    "columns differ": ({"column_sizes": [None]}, "the columns are"),
    "column size": ({"column_sizes": [None, -4]}, "has the size -4"),
    "samples": ({"samples": 10**12}, "samples is 1000000000000"),
    "fewer samples": ({"samples": 3}, "index.json says 3"),
    "hash": (
        {"raw_data": {"basename": "shard.00000.mds", "bytes": 1383, "hashes": {"x": "1"}}},
        "kind 'x', which is not known",
    ),
}


def shorten(path, count):
    path.write_bytes(path.read_bytes()[:-count])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *FILES.values(),
        *[(lambda folder, c=change: rewrite(folder, c), message) for change, message in CONTENT.values()],
        *[
            (lambda folder, f=fields: change_index(folder, lambda i: i["shards"][0].update(f)), message)
            for fields, message in SHARD_FIELDS.values()
        ],
    ],
    ids=[*FILES, *CONTENT, *SHARD_FIELDS],
)
def test_a_damaged_or_hostile_shard_is_one_message_and_no_dataset(tmp_path, prepare, damage, message):
    folder = copy_of(tmp_path)
    damage(folder)
    with pytest.raises(UserError, match=message) as error:
        prepare(folder, *IDS)
    assert len(str(error.value)) < 1000
    assert not list((tmp_path / "dataset").glob("train*"))
    assert not (tmp_path / "dataset" / "meta.json").exists()


def test_a_compressed_shard_that_was_cut_is_damaged(tmp_path, prepare):
    folder = copy_of(tmp_path, "ndarray_zstd")
    path = folder / "shard.00000.mds.zstd"
    shorten(path, 30)
    info = {"basename": path.name, "bytes": path.stat().st_size, "hashes": {}}
    change_index(folder, lambda index: index["shards"][0].update(zip_data=info))
    with pytest.raises(UserError, match=r"shard.00000.mds.zstd is damaged"):
        prepare(folder, *IDS)


def test_what_unpacks_to_more_than_it_says_is_not_unpacked_whole(tmp_path, prepare):
    folder = copy_of(tmp_path, "ndarray_shape")
    change_index(folder, lambda index: index["shards"][0]["raw_data"].update(bytes=100))
    with pytest.raises(UserError, match="has more than 100 bytes"):
        prepare(folder, *IDS)


def test_a_compression_that_is_not_read_is_refused_before_anything_is_made(tmp_path, prepare):
    with pytest.raises(
        UserError, match="compressed by 'br'; decompress the shards, or write them with one of"
    ):
        prepare(SHARDS / "brotli")
    assert not (tmp_path / "dataset").exists()


def test_pickled_columns_are_never_read(prepare):
    with pytest.raises(UserError, match="'pkl' can run any code"):
        prepare(SHARDS / "pickled", "--tokens", "extra")
    assert read_meta(prepare(SHARDS / "pickled"))["documents"] == 2  # the column beside it is left alone


def test_a_mask_of_zeros_and_ones_is_not_taken_for_lengths(prepare):
    with pytest.raises(ValueError, match="is a mask of zeros and ones"):
        checked_lengths(np.ones(T, np.int64), np.arange(T))
    folder = SHARDS / "ndarray_shape"
    rejected = read(folder, "attention_mask", "input_ids")
    assert len(rejected) == len(SAMPLES) and "do not add up to its 4 tokens" in rejected[0]
    with pytest.raises(UserError, match="12 bad records in all, more than --max_bad=0"):
        prepare(folder, "--tokens", "attention_mask", "--lengths", "input_ids")


@pytest.mark.parametrize(
    ("encoding", "value", "message"),
    [
        ("ndarray", b"", "type None"),
        ("ndarray", bytes([34, 4, 1]) + b"\0" * 4, "type 34, not of whole numbers"),
        ("ndarray:uint32", bytes([2 << 2, 1, 1]) + b"\0" * 4, "array of 2 axes"),
        ("ndarray:uint32", bytes([1 << 2 | 3, 9]), "or cut off"),
        ("ndarray:uint32", bytes([1 << 2, 9]) + b"\0" * 8, "8 bytes are not 9 numbers"),
        ("ndarray:uint32:9", b"\0" * 8, "8 bytes are not 9 numbers"),
        ("bytes", b"\0" * 9, "9 bytes are not numbers of the type int64"),
    ],
)
def test_an_array_that_cannot_be_ids_is_refused(encoding, value, message):
    with pytest.raises(ValueError, match=message):
        decode_numbers(encoding, memoryview(value), "int64")
