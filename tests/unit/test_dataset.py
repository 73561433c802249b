"""Every fault of a dataset is found and named before the first step; the scan that finds some runs once."""

import collections
import json
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.helpers import HANG_S, ROOT, TINY, make_dataset

from common.errors import RunError, UserError
from data.folders import dataset_folder
from data.pipeline import verified
from data.pipeline.part_writer import write_part
from data.pipeline.parts import File, Part, Settings
from data.pipeline.token_files import described
from data.tokenizers.char_tokenizer import CharTokenizer
from training.batches.dataset import open_dataset
from training.batches.loader import IterationBatches
from training.batches.windows import StreamWindows
from training.configuration.keys import TrainConfig
from training.process.world import World

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
    assert dataset_folder("quickstart") == ROOT / "data" / "quickstart"
    assert dataset_folder(str(folder)) == folder


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


# --- faults ---


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_absent_token_file_is_named_with_the_prepare_script_that_makes_it(folder, name):
    (folder / name).unlink()
    (folder / "prepare.py").touch()
    message = refusal(folder)
    assert f"no token file {folder / name}" in message
    assert f"make it with: python {os.path.relpath(folder / 'prepare.py')}" in message


def test_absent_meta_names_the_command_that_makes_it_for_files_of_nanogpt(folder):
    (folder / "meta.json").unlink()
    message = refusal(folder, vocab_size=50304)
    assert f"no {folder / 'meta.json'}" in message
    subprocess.run(message.partition("GPT-2's tokens: ")[2], shell=True, check=True)
    splits, meta = open_dataset(config(folder, vocab_size=50304), scan=True)
    assert {split: files.total for split, files in splits.items()} == {"train": 20_000, "val": 4_000}
    assert (meta["eot_id"], meta["tokenizer"]["name"]) == (50256, "gpt2")


@pytest.mark.parametrize(("dtype", "stored"), [("uint16", "<u4"), ("uint32", "<i8")])
def test_ids_that_are_wider_than_a_meta_json_by_hand_says_are_refused(folder, dtype, stored):
    np.arange(40_000, 60_000, 7).astype(stored).tofile(folder / "train.bin")
    (folder / "meta.json").write_text(json.dumps({"dtype": dtype, "vocab_size": 65_000}))
    assert f"if ids are {dtype}, so they have more bits" in refusal(folder, vocab_size=65_000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is damaged"),
        ("[1, 2]", "is damaged"),
        ('{"dtype": "uint16"}', "vocab_size None"),
        ('{"dtype": "uint16", "vocab_size": "many"}', "vocab_size 'many'"),
        ('{"dtype": ["uint16"], "vocab_size": 64}', "dtype ['uint16']"),
        ('{"dtype": "int64", "vocab_size": 64}', "dtype 'int64' with a vocabulary of 64; it is one of"),
        ('{"dtype": "uint16", "vocab_size": 64, "files": [1]}', "files [1]"),
        ('{"dtype": "uint16", "vocab_size": 64, "files": {"train.bin": 20000}}', "20000 of train.bin"),
    ],
)
def test_damaged_meta_is_named_with_what_is_wrong(folder, text, said):
    (folder / "meta.json").write_text(text)
    message = refusal(folder)
    assert str(folder / "meta.json") in message and said in message


def test_uint16_with_a_vocabulary_beyond_16_bits_is_refused(folder):
    by_hand(folder, vocab_size=65_537)
    message = refusal(folder, vocab_size=65_537)
    assert "dtype 'uint16' with a vocabulary of 65537; it is one of" in message
    by_hand(folder, vocab_size=65_536)
    assert open_dataset(config(folder, vocab_size=65_536), scan=True)


@pytest.mark.parametrize(
    ("dtype", "size", "said"),
    [("uint16", 0, "empty"), ("uint16", 4_001, "uint16"), ("uint32", 4_002, "uint32")],
)
@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_file_whose_size_cannot_be_is_named(folder, name, dtype, size, said):
    by_hand(folder, dtype)
    (folder / name).write_bytes(bytes(size))
    message = refusal(folder)
    assert str(folder / name) in message and said in message and (not size or f"{size} bytes" in message)


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


def test_file_that_meta_does_not_describe_is_refused_at_every_start(folder):
    ids = np.fromfile(folder / "train.bin", "<u2")
    ids[7] = (ids[7] + 1) % VOCABULARY
    write_ids(folder / "train.bin", ids)
    for _ in range(2):
        assert "train.bin is not the file that meta.json describes (sha256" in refusal(folder)


# --- the scan ---


@pytest.fixture
def scanned(monkeypatch):
    """The names of the files that were read whole."""
    names, scan = [], verified.scan

    def counting(path, *arguments):
        names.append(path.name)
        return scan(path, *arguments)

    monkeypatch.setattr(verified, "scan", counting)
    return names


def test_second_start_reads_no_file_again_and_still_refuses_a_smaller_vocabulary(folder, scanned):
    by_hand(folder, vocab_size=1)  # says less than the ids need
    for _ in range(2):
        open_dataset(config(folder), scan=True)
        assert sorted(scanned) == ["train.bin", "val.bin"]
    assert f"token id {VOCABULARY - 1}" in refusal(folder, vocab_size=VOCABULARY - 1)
    assert sorted(scanned) == ["train.bin", "val.bin"]


def test_machines_with_one_disk_read_each_file_once(folder, monkeypatch, caplog):
    """The second one waits for the first, says so, and reads only what the first has not read."""
    names, scan, second_waits = [], verified.scan, threading.Event()
    monkeypatch.setattr(verified.log, "warning", lambda *_: second_waits.set())

    def counting(path, *arguments):
        names.append(path.name)
        assert second_waits.wait(HANG_S)
        return scan(path, *arguments)

    monkeypatch.setattr(verified, "scan", counting)
    with ThreadPoolExecutor(2) as machines:
        opened = [machines.submit(open_dataset, config(folder), scan=True) for _ in range(2)]
        assert [each.result(60)[0]["train"].total for each in opened] == [20_000, 20_000]
    assert sorted(names) == ["train.bin", "val.bin"]


def test_a_link_in_place_of_the_lock_is_not_followed(folder, tmp_path):
    (folder / verified.LOCK).symlink_to(tmp_path / "elsewhere")
    assert open_dataset(config(folder), scan=True)[0]["train"].total == 20_000
    assert not (tmp_path / "elsewhere").exists()


def test_changed_file_is_scanned_again(folder, scanned):
    by_hand(folder)
    open_dataset(config(folder), scan=True)
    ids = np.fromfile(folder / "train.bin", "<u2")
    ids[0] = VOCABULARY
    before = (folder / "train.bin").stat()
    write_ids(folder / "train.bin", ids)  # of the same size
    os.utime(folder / "train.bin", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert f"token id {VOCABULARY}" in refusal(folder)
    assert sorted(scanned) == ["train.bin", "train.bin", "val.bin"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"train.bin": 3}', '{"train.bin": {"max_id": "x"}}'])
def test_damaged_memory_of_a_scan_means_another_scan(folder, scanned, text):
    (folder / ".verified.json").write_text(text)
    open_dataset(config(folder), scan=True)
    assert sorted(scanned) == ["train.bin", "val.bin"]


def test_read_only_dataset_works_and_is_scanned_every_time(folder, scanned, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(13, "read-only file system", str(path))

    monkeypatch.setattr("common.durable_file.create", refuse)  # a mode would not stop root
    for _ in range(2):
        assert open_dataset(config(folder), scan=True)[0]["train"].total == 20_000
    assert sorted(scanned) == sorted(2 * ["train.bin", "val.bin"])
    assert not list(folder.glob(".verified.json*"))


def test_reading_that_was_stopped_goes_on_where_it_was(folder, scanned, monkeypatch):
    monkeypatch.setattr(verified, "THREADS", 1)
    make_shards(folder, [100, 100, 100])
    write_ids(folder / "train_002.bin", [VOCABULARY] * 100)
    refusal(folder, eval_interval=0)
    write_ids(folder / "train_002.bin", [0] * 100)
    open_dataset(config(folder, eval_interval=0), scan=True)
    assert scanned == ["train_000.bin", "train_001.bin", "train_002.bin", "train_002.bin"]


def test_file_that_was_hashed_when_it_was_written_is_not_read_again(tmp_path, scanned):
    text, folder = tmp_path / "a.txt", tmp_path / "tokens"
    text.write_text("text of a document " * 150)
    (folder / "parts").mkdir(parents=True)
    settings = Settings(eot_id=0, bos_id=None, val_fraction=0.0, shard_tokens=1000)
    tokenizer = CharTokenizer(" acdefmnotux")
    part = Part(0, (File(str(text), text.name, "train", 1),))
    record = write_part(part, folder, tokenizer, settings, 0)
    meta = {"dtype": "uint16", "vocab_size": tokenizer.vocab_size, "files": record["files"]}
    (folder / "meta.json").write_text(json.dumps(meta))
    open_dataset(config(folder, eval_interval=0), scan=True)
    assert len(record["files"]) == 3 and scanned == []
    copied = folder / "train_000000_001.bin"
    copied.write_bytes(copied.read_bytes())  # the same bytes, at another time
    open_dataset(config(folder, eval_interval=0), scan=True)
    assert scanned == [copied.name]


# --- without reading ---


def test_verifying_sizes_reads_nothing_and_says_so(folder, scanned, caplog):
    with caplog.at_level(logging.WARNING, "nanomfu"):
        open_dataset(config(folder, verify_data="size"), scan=True)
    assert scanned == []
    assert "2 of 2 token files" in caplog.text and "--hash" in caplog.text
    write_ids(folder / "train.bin", [0] * 19_999)
    assert "holds 19,999 tokens" in refusal(folder, verify_data="size")


def test_recorded_ids_are_compared_with_the_model_on_every_rank_without_reading(folder):
    edit_meta(folder, files={"train.bin": {"tokens": 20_000, "max_id": VOCABULARY}})
    assert f"token id {VOCABULARY}" in refusal(folder, scan=False)
    assert f"token id {VOCABULARY}" in refusal(folder, verify_data="size")


def test_wrong_id_that_was_trusted_stops_the_run_before_a_device_sees_it(folder):
    ids = np.fromfile(folder / "train.bin", "<u2")
    ids[700] = VOCABULARY
    write_ids(folder / "train.bin", ids)
    windows = StreamWindows(open_dataset(config(folder, verify_data="size"), scan=True)[0]["train"], 32)
    windows.read(np.array([20, 23]))
    with pytest.raises(RunError, match=f"train.bin contains token id {VOCABULARY} at 700") as error:
        windows.read(np.array([20, 21]))
    assert "--hash" in str(error.value)


# --- training is not validation ---


def test_validation_that_is_a_link_to_training_is_refused(folder):
    by_hand(folder)
    (folder / "val.bin").unlink()
    (folder / "val.bin").symlink_to(folder / "train.bin")
    message = refusal(folder)
    assert "val.bin is the same file as" in message and "--eval_interval=0" in message
    assert open_dataset(config(folder, eval_interval=0), scan=True)


# --- scale ---

SHARDS, SHARD_TOKENS = 5_000, 125_400_000  # 627 B tokens


@pytest.fixture(scope="module")
def huge(tmp_path_factory):
    """627 B tokens in 5,000 sparse shards of uint32, all zeros, that count as read."""
    folder = tmp_path_factory.mktemp("huge")
    names = [f"train_{i:06d}_000.bin" for i in range(SHARDS)]
    files = {name: {"tokens": SHARD_TOKENS, "sha256": "0" * 64, "max_id": 0} for name in names}
    try:
        for name in names:
            with open(folder / name, "wb") as file:
                file.truncate(4 * SHARD_TOKENS)
    except OSError as error:
        pytest.skip(f"no room for sparse files: {error}")
    meta = {"dtype": "uint32", "vocab_size": VOCABULARY, "files": files}
    (folder / "meta.json").write_text(json.dumps(meta))
    listed = described("uint32", files)
    verified.remember(folder, {name: verified.entry(folder / name, listed[name]) for name in names})
    yield folder
    for name in names:
        (folder / name).unlink()  # pytest keeps folders of earlier runs


def calls_of(function) -> tuple[int, int]:
    """(calls of all functions, files that are opened) while it runs."""
    names = collections.Counter()

    def count(frame, event, argument):
        names[argument.__name__ if event == "c_call" else event] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return sum(names.values()), names["open"]


@pytest.mark.parametrize("scan", [True, False])
def test_start_on_5000_shards_opens_few_files_and_is_linear_in_their_number(huge, scan):
    settings = config(huge, eval_interval=0)
    calls, opened = calls_of(lambda: open_dataset(settings, scan))
    assert opened < 20 and calls < 500 * SHARDS  # a quadratic step alone would make 5,000 for each


def test_windows_come_from_all_over_5000_shards(huge):
    settings = config(huge, eval_interval=0, batch_size=400)
    windows = StreamWindows(open_dataset(settings, scan=False)[0]["train"], settings.block_size)
    assert windows.count == (SHARDS * SHARD_TOKENS - 1) // 32
    batches = IterationBatches(windows, settings, World(0, 0, 1, "cpu"))
    indices, _ = windows.places(batches.numbers_at(10**9).ravel(), seed=1)
    shards = indices * 32 // SHARD_TOKENS
    assert len(np.unique(indices)) == 400 and len(np.unique(shards)) > 350  # 384 are expected
    before = len(os.listdir("/proc/self/fd"))  # those of earlier tests in this process, too
    assert batches[10**9].shape == (1, 400, 33)
    assert len(os.listdir("/proc/self/fd")) - before <= 256  # of 1024 that a process may have
