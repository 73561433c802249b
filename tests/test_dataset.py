"""Every fault of a dataset is found and named before the first step; the scan that finds some runs once."""

import json
import os

import numpy as np
import pytest
from helpers import ROOT, TINY, make_dataset

from training import dataset as dataset_module
from training.config import TrainConfig, UserError
from training.dataset import dataset_folder, open_dataset

VOCABULARY = TINY["vocab_size"]


@pytest.fixture
def folder(tmp_path):
    return make_dataset(tmp_path / "tokens")


def config(folder, **keys) -> TrainConfig:
    return TrainConfig(**{**TINY, "dataset": str(folder), "eval_interval": 1, **keys})


def refusal(folder, scan=True, **keys) -> str:
    with pytest.raises(UserError) as error:
        open_dataset(config(folder, **keys), scan)
    return str(error.value)


def edit_meta(folder, **fields):
    path = folder / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def by_hand(folder, dtype="uint16", vocab_size=VOCABULARY):
    """The shortest meta.json that a user writes: nothing recorded to compare with."""
    (folder / "meta.json").write_text(json.dumps({"dtype": dtype, "vocab_size": vocab_size}))


def write_ids(path, ids, dtype="<u2"):
    np.asarray(ids).astype(dtype).tofile(path)


# --- what a good one gives ---


def test_good_dataset_opens_with_its_splits_and_meta(folder):
    splits, meta = open_dataset(config(folder), scan=True)
    assert {split: files.total for split, files in splits.items()} == {"train": 20_000, "val": 4_000}
    assert meta["vocab_size"] == VOCABULARY
    expected = np.fromfile(folder / "train.bin", "<u2")
    assert np.array_equal(splits["train"].read(123, 456), expected[123:579])


def test_validation_split_is_needed_only_where_the_run_evaluates(folder):
    (folder / "val.bin").unlink()
    assert list(open_dataset(config(folder, eval_interval=0), scan=True)[0]) == ["train"]
    for key, value in (("eval_interval", 1), ("eval_only", True), ("eval_at_start", True)):
        assert "val.bin" in refusal(folder, **{"eval_interval": 0, key: value})


def test_name_is_a_folder_in_data_and_a_slash_makes_it_a_path(folder):
    assert dataset_folder(config("quickstart")) == ROOT / "data" / "quickstart"
    assert dataset_folder(config(folder)) == folder


def test_meta_written_by_hand_is_enough(folder):
    by_hand(folder)
    assert open_dataset(config(folder), scan=True)[0]["train"].total == 20_000


def test_uint32_ids_above_65535_are_read_whole(tmp_path):
    folder = make_dataset(tmp_path / "wide", vocab_size=100_000, train_tokens=90_000, dtype="uint32")
    splits, _ = open_dataset(config(folder, vocab_size=100_000), scan=True)
    everything = splits["train"].read(0, 90_000)
    assert everything.dtype == np.dtype("<u4") and everything.max() > 65_535
    assert np.array_equal(everything, np.fromfile(folder / "train.bin", "<u4"))


# --- shards ---


def make_shards(folder, sizes):
    ids = np.fromfile(folder / "train.bin", "<u2")
    (folder / "train.bin").unlink()
    for i, (start, size) in enumerate(zip(np.cumsum([0, *sizes[:-1]]), sizes, strict=True)):
        write_ids(folder / f"train_{i:03d}.bin", ids[start : start + size])
    return ids[: sum(sizes)]


def test_shards_read_as_one_sequence_across_their_boundaries(folder):
    ids = make_shards(folder, [100, 33, 1, 500])
    train = open_dataset(config(folder), scan=True)[0]["train"]
    assert train.total == len(ids) == 634
    assert np.array_equal(train.read(0, 634), ids)
    for start in (0, 60, 99, 100, 132, 133, 134, 601):
        assert np.array_equal(train.read(start, 33), ids[start : start + 33]), start


def test_every_shard_is_scanned(folder):
    make_shards(folder, [100, 100, 100])
    write_ids(folder / "train_001.bin", [0] * 99 + [VOCABULARY])
    message = refusal(folder)
    assert "train_001.bin" in message and f"token id {VOCABULARY}" in message


def test_empty_shard_is_named(folder):
    make_shards(folder, [100, 100, 100])
    (folder / "train_001.bin").write_bytes(b"")
    message = refusal(folder)
    assert "train_001.bin" in message and "empty" in message


# --- faults ---


def test_absent_folder_is_named_with_what_data_can_make(tmp_path):
    message = refusal(tmp_path / "absent")
    assert f"there is no folder {tmp_path / 'absent'}" in message and "quickstart" in message
    assert "there is no folder" in refusal("a_name_in_data_that_does_not_exist")


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_absent_token_file_is_named_with_the_prepare_script_that_makes_it(folder, name):
    (folder / name).unlink()
    (folder / "prepare.py").touch()
    message = refusal(folder)
    assert f"no token file {folder / name}" in message
    assert f"make it with: python {os.path.relpath(folder / 'prepare.py')}" in message


def test_absent_token_file_without_a_prepare_script_says_how_to_make_one(folder):
    (folder / "train.bin").unlink()
    assert "python data/text/prepare.py" in refusal(folder)


def test_absent_meta_shows_what_to_write(folder):
    (folder / "meta.json").unlink()
    message = refusal(folder)
    assert f"no {folder / 'meta.json'}" in message and '"vocab_size"' in message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2]",
        "null",
        '"text"',
        '{"dtype": "uint16"}',
        '{"vocab_size": 64}',
        '{"dtype": "uint16", "vocab_size": null}',
        '{"dtype": "uint16", "vocab_size": "many"}',
        '{"dtype": ["uint16"], "vocab_size": 64}',
        '{"dtype": "uint16", "vocab_size": 64, "files": null}',
        '{"dtype": "uint16", "vocab_size": 64, "files": [1]}',
        '{"dtype": "uint16", "vocab_size": 64, "files": {"train.bin": 20000}}',
    ],
)
def test_damaged_meta_is_named(folder, text):
    (folder / "meta.json").write_text(text)
    assert str(folder / "meta.json") in refusal(folder)


def test_meta_that_is_no_text_is_named(folder):
    (folder / "meta.json").write_bytes(b"\xff\xfe\x00")
    assert str(folder / "meta.json") in refusal(folder)


def test_vocabulary_size_written_as_a_string_counts_as_the_number(folder):
    by_hand(folder, vocab_size=str(VOCABULARY))
    assert open_dataset(config(folder), scan=True)
    by_hand(folder, vocab_size=str(VOCABULARY + 1))
    assert "vocabulary" in refusal(folder)


def test_unknown_dtype_lists_the_known_ones(folder):
    by_hand(folder, dtype="int64")
    message = refusal(folder)
    assert "'int64'" in message and "uint16, uint32" in message


def test_uint16_with_a_vocabulary_beyond_16_bits_is_refused(folder):
    by_hand(folder, vocab_size=65_537)
    message = refusal(folder, vocab_size=65_537)
    assert "65537 does not fit in uint16" in message
    by_hand(folder, vocab_size=65_536)
    assert open_dataset(config(folder, vocab_size=65_536), scan=True)


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_empty_file_is_named(folder, name):
    by_hand(folder)
    (folder / name).write_bytes(b"")
    message = refusal(folder)
    assert str(folder / name) in message and "empty" in message


@pytest.mark.parametrize("dtype, size", [("uint16", 4_001), ("uint32", 4_002)])
def test_size_that_is_no_multiple_of_the_dtype_is_named(folder, dtype, size):
    by_hand(folder, dtype)
    (folder / "train.bin").write_bytes(bytes(size))
    message = refusal(folder)
    assert str(folder / "train.bin") in message and f"{size} bytes" in message and dtype in message


def test_split_shorter_than_one_window_is_refused(folder):
    by_hand(folder)
    write_ids(folder / "val.bin", np.zeros(32))
    message = refusal(folder, block_size=32)
    assert "val split" in message and "32 tokens" in message and "block_size + 1 = 33" in message
    write_ids(folder / "val.bin", np.zeros(33))
    assert open_dataset(config(folder, block_size=32), scan=True)


def test_dataset_vocabulary_beyond_the_models_names_both(folder):
    edit_meta(folder, vocab_size=65, tokenizer={"name": "byte-pair"})
    message = refusal(folder)
    assert "vocabulary of 65 (byte-pair)" in message and "vocab_size=64" in message
    assert "--vocab_size=65" in message
    assert open_dataset(config(folder, vocab_size=65), scan=True)
    assert open_dataset(config(folder, vocab_size=128), scan=True)  # padding the model's is fine


@pytest.mark.parametrize("position", [0, 12_345, 19_999])
def test_one_id_beyond_the_vocabulary_is_found_wherever_it_is(folder, position):
    by_hand(folder)
    ids = np.fromfile(folder / "train.bin", "<u2")
    ids[position] = VOCABULARY
    write_ids(folder / "train.bin", ids)
    message = refusal(folder)
    assert f"token id {VOCABULARY}" in message and f"vocab_size={VOCABULARY}" in message


def test_id_is_found_in_the_last_chunk_of_a_scan_too(folder, monkeypatch):
    monkeypatch.setattr(dataset_module, "SCAN_TOKENS", 1_000)
    by_hand(folder)
    ids = np.fromfile(folder / "train.bin", "<u2")
    ids[-1] = VOCABULARY
    write_ids(folder / "train.bin", ids)
    assert f"token id {VOCABULARY}" in refusal(folder)


def test_file_that_meta_does_not_describe_is_refused(folder):
    ids = np.fromfile(folder / "train.bin", "<u2")
    ids[7] = (ids[7] + 1) % VOCABULARY
    write_ids(folder / "train.bin", ids)
    message = refusal(folder)
    assert "train.bin is not the file that meta.json describes" in message and "sha256" in message


def test_token_count_that_meta_does_not_record_is_refused(folder):
    ids = np.fromfile(folder / "train.bin", "<u2")
    write_ids(folder / "train.bin", ids[:-1])
    message = refusal(folder, scan=False)  # every rank sees it, without a scan
    assert "holds 19,999 tokens" in message and "records 20,000" in message


# --- the scan ---


@pytest.fixture
def scanned(monkeypatch):
    """The names of the files that were read whole, in order."""
    names, scan = [], dataset_module._scan

    def counting(path, dtype):
        names.append(path.name)
        return scan(path, dtype)

    monkeypatch.setattr(dataset_module, "_scan", counting)
    return names


def test_second_start_reads_no_file_again(folder, scanned):
    open_dataset(config(folder), scan=True)
    assert scanned == ["train.bin", "val.bin"]
    open_dataset(config(folder), scan=True)
    assert scanned == ["train.bin", "val.bin"]


def test_only_the_rank_that_is_asked_to_scans(folder, scanned):
    open_dataset(config(folder), scan=False)
    assert scanned == []


def test_remembered_scan_still_refuses_a_smaller_vocabulary(folder, scanned):
    by_hand(folder, vocab_size=1)  # says less than the ids need
    open_dataset(config(folder), scan=True)
    assert f"token id {VOCABULARY - 1}" in refusal(folder, vocab_size=VOCABULARY - 1)
    assert scanned == ["train.bin", "val.bin"]


def test_changed_file_is_scanned_again(folder, scanned):
    by_hand(folder)
    open_dataset(config(folder), scan=True)
    ids = np.fromfile(folder / "train.bin", "<u2")
    ids[0] = VOCABULARY
    before = (folder / "train.bin").stat()
    write_ids(folder / "train.bin", ids)  # of the same size
    os.utime(folder / "train.bin", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert f"token id {VOCABULARY}" in refusal(folder)
    assert scanned == ["train.bin", "val.bin", "train.bin"]


def test_files_read_as_another_dtype_are_scanned_again(tmp_path, scanned):
    folder = make_dataset(tmp_path / "wide", vocab_size=70_000, train_tokens=90_000, dtype="uint32")
    by_hand(folder, "uint16", 65_536)  # a mistake, soon corrected
    open_dataset(config(folder, vocab_size=69_000), scan=True)
    by_hand(folder, "uint32", 69_000)
    assert "token id 69,999" in refusal(folder, vocab_size=69_000)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"train.bin": 3}', '{"train.bin": {"max_id": "x"}}'])
def test_damaged_memory_of_a_scan_means_another_scan(folder, scanned, text):
    (folder / ".verified.json").write_text(text)
    open_dataset(config(folder), scan=True)
    assert scanned == ["train.bin", "val.bin"]


def test_read_only_dataset_works_and_is_scanned_every_time(folder, scanned, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(13, "read-only file system", str(path))

    monkeypatch.setattr("pathlib.Path.write_text", refuse)  # a mode would not stop root
    for _ in range(2):
        assert open_dataset(config(folder), scan=True)[0]["train"].total == 20_000
    assert scanned == 2 * ["train.bin", "val.bin"]
    assert not list(folder.glob(".verified*"))
