"""The worst day of data: token files that change under a run, damaged packings, advice that repairs."""

import hashlib
import json
import os
import shutil
import sys
import time

import numpy as np
import pytest
from support.helpers import HANG_S, TINY, edit_json, last_run, make_dataset, start_train, write_config
from support.hostile_files import replace
from support.preparation import shared, small_bpe

import data.inspect.__main__ as inspect
from common.errors import RunError, UserError
from data.pipeline.dataset_tokenizer import load_tokenizer
from data.pipeline.meta_file import read_meta
from data.text import prepare as text_prepare
from training.batches.sources import make_windows, open_sources
from training.configuration.keys import TrainConfig

# --- token files that change under a run ---


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("packing", ["stream", "truncate"])
def test_token_file_truncated_during_training_is_named(tmp_path, workers, packing):
    folder = make_dataset(tmp_path / "tokens", eot_id=0)
    out = tmp_path / "out"
    keys = {**TINY, "dataset": folder, "out_dir": out, "max_iters": 10**6, "lr_decay_iters": 10**6}
    keys |= {"packing": packing, "use_dataloader": workers > 0, "dataloader_num_workers": max(workers, 1)}
    process = start_train(write_config(tmp_path / "run.py", **keys))
    try:
        wait_for_rows(out)
        os.truncate(folder / "train.bin", 1000)
        _, stderr = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1, (process.returncode, stderr)
    assert f"{folder}/train.bin had 40,000 bytes when the run started and has 1,000 now" in stderr
    assert "Traceback" not in stderr and stderr.count("train.bin") == 1
    assert last_run(out)["status"] == "failed"


def wait_for_rows(out) -> None:
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        if list(out.glob("run_*.json")) and last_run(out)["training_iterations"]:
            return
        time.sleep(0.1)
    pytest.fail("no row in 60 s")


# --- a packing is data like any other ---


def packed_config(folder, **keys) -> TrainConfig:
    return TrainConfig(**{**TINY, "dataset": str(folder), "packing": "truncate", **keys})


def rows_of(folder) -> np.ndarray:
    settings = packed_config(folder)
    windows = make_windows(open_sources(settings, scan=True), settings)["train"]
    return windows.samples(np.arange(40), seed=1)


def rewrite(path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


def edit_index(**fields):
    return lambda packing: edit_json(packing / "index.json", **fields)


def flip(content: bytes) -> bytes:
    return content[:400] + bytes([content[400] ^ 1]) + content[401:]


DAMAGE = {
    "pieces cut by 10 %": lambda p: rewrite(p / "pieces.bin", lambda c: c[: len(c) * 9 // 160 * 16]),
    "windows cut by 10 %": lambda p: rewrite(p / "windows.bin", lambda c: c[: len(c) * 9 // 80 * 8]),
    "a bit of the pieces": lambda p: rewrite(p / "pieces.bin", flip),
    "a bit of the windows": lambda p: rewrite(p / "windows.bin", flip),
    "no pieces": lambda p: (p / "pieces.bin").unlink(),
    "no hash": edit_index(sha256=None),
    "a count as text": edit_index(windows="5"),
    "fewer windows": edit_index(windows=3),
    "a named pipe": lambda p: replace(p / "index.json", "pipe"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_packing_is_made_again_with_one_warning(tmp_path, damage, caplog):
    folder = make_dataset(tmp_path / "tokens", eot_id=0)
    rows = rows_of(folder)
    packing = folder / ".packed-train-32"
    DAMAGE[damage](packing)
    caplog.clear()
    assert np.array_equal(rows_of(folder), rows)
    assert len(caplog.messages) == 1 and f"{packing} is damaged" in caplog.messages[0]
    caplog.clear()
    assert np.array_equal(rows_of(folder), rows) and not caplog.messages
    assert sorted(path.name for path in folder.glob(".packed*")) == [".packed-train-32"]


def test_packing_that_is_a_link_is_not_written_through(tmp_path):
    folder = make_dataset(tmp_path / "tokens", eot_id=0)
    (tmp_path / "elsewhere").mkdir()
    for target in ("elsewhere", "absent"):
        (folder / ".packed-train-32").symlink_to(tmp_path / target)
        rows_of(folder)
        assert (folder / ".packed-train-32").is_dir() and not (folder / ".packed-train-32").is_symlink()
        shutil.rmtree(folder / ".packed-train-32")
    assert not list((tmp_path / "elsewhere").iterdir()) and not (tmp_path / "absent").exists()


def test_packing_that_is_changed_under_a_run_is_named(tmp_path):
    folder = make_dataset(tmp_path / "tokens", eot_id=0)
    settings = packed_config(folder)
    windows = make_windows(open_sources(settings, scan=True), settings)["train"]
    pieces = np.fromfile(folder / ".packed-train-32" / "pieces.bin", np.int64)
    for wrong in (-1, 0, 10**9, 2**62):
        changed = pieces.copy()
        changed[1] = wrong  # a length
        changed.tofile(folder / ".packed-train-32" / "pieces.bin")
        with pytest.raises(RunError, match=r"packed-train-32/pieces.bin was changed"):
            windows.read(np.arange(windows.count))
    pieces[:2].tofile(folder / ".packed-train-32" / "pieces.bin")
    with pytest.raises(RunError, match=r"packed-train-32/pieces.bin had .* bytes when the run started"):
        windows.read(np.arange(windows.count))


def test_resume_with_another_packing_is_refused(run, tmp_path, capfd):
    folder = make_dataset(tmp_path / "tokens", eot_id=0)
    keys = {**TINY, "packing": "truncate", "dataset": folder, "out_dir": tmp_path / "out", "max_iters": 4}
    path = write_config(tmp_path / "run.py", **keys)
    assert run(path, "--max_iters=2") == 0
    packing = folder / ".packed-train-32"
    rewrite(packing / "pieces.bin", lambda c: c[32:48] + c[16:32] + c[:16] + c[48:])  # two documents change
    files = [(packing / name).read_bytes() for name in ("pieces.bin", "windows.bin")]
    hashes = [hashlib.sha256(content).hexdigest() for content in files]
    edit_json(packing / "index.json", sha256=hashlib.sha256("".join(hashes).encode()).hexdigest())
    capfd.readouterr()
    assert run(path, "--init_from=resume") == 2
    assert "another packing .packed-train-32" in capfd.readouterr().err
    shutil.rmtree(packing)
    assert run(path, "--init_from=resume") == 0  # made again, it is the same


# --- repair advice repairs ---


def trains(run, folder, tmp_path) -> None:
    keys = {**TINY, "dataset": folder, "vocab_size": read_meta(folder)["vocab_size"], "block_size": 8}
    keys |= {"eval_interval": 2, "max_iters": 2, "out_dir": tmp_path / "out"}
    assert run(write_config(tmp_path / "run.py", **keys)) == 0


def prepare_text(monkeypatch, output, *flags) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, flags), "--output", str(output), "--workers=1"])
    text_prepare.main()


@pytest.mark.parametrize("same_time", [False, True])
def test_own_text_with_a_flipped_bit_is_made_again_by_the_same_command(
    run, monkeypatch, tmp_path, same_time, capsys
):
    """same_time: as a failing disk does it, which changes no time."""
    bpe, folder = small_bpe(tmp_path), tmp_path / "own"
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(f"document {i} " * 50)
    flags = ["--input", *sorted(tmp_path.glob("*.txt")), "--tokenizer", bpe]
    prepare_text(monkeypatch, folder, *flags)
    first = sorted(folder.glob("train*.bin"))[0]
    whole, was = first.read_bytes(), first.stat()
    rewrite(first, flip)
    if same_time:
        os.utime(first, ns=(was.st_atime_ns, was.st_mtime_ns))
    else:
        with pytest.raises(UserError, match="is not the file that meta.json describes"):
            open_sources(TrainConfig(**{**TINY, "dataset": str(folder), "vocab_size": 10**5}), scan=True)
    with pytest.raises(UserError, match="run the dataset's prepare.py again"):
        inspect.check_files(folder, read_meta(folder), hashes=True)
    prepare_text(monkeypatch, folder, *flags)
    assert first.read_bytes() == whole and f"{first} is damaged; it is made again" in capsys.readouterr().out
    trains(run, folder, tmp_path)


def test_one_text_twice_is_refused_and_without_its_copy_it_trains(run, monkeypatch, tmp_path):
    bpe, folder = small_bpe(tmp_path), tmp_path / "own"
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("the same text " * 100)
    flags = ["--tokenizer", bpe, "--val_fraction=0.1"]
    with pytest.raises(UserError, match="holds one text only.*--input.*--no-resume"):
        prepare_text(monkeypatch, folder, "--input", tmp_path / "a.txt", tmp_path / "b.txt", *flags)
    assert not (folder / "meta.json").exists()
    prepare_text(monkeypatch, folder, "--input", tmp_path / "a.txt", *flags, "--no-resume")
    trains(run, folder, tmp_path)


def test_meta_without_a_tokenizer_shows_ids_and_says_what_to_add(monkeypatch, tmp_path, capsys):
    def inspected() -> str:
        monkeypatch.setattr(sys, "argv", ["inspect", str(folder), "--hash"])
        inspect.main()
        return capsys.readouterr().out

    folder = make_dataset(tmp_path / "tokens")
    (folder / "meta.json").write_text('{"dtype": "uint16", "vocab_size": 64}')
    assert "samples are ids" in inspected()
    with pytest.raises(UserError, match="add it by hand") as error:
        load_tokenizer(folder)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared("tiktoken_cache")))
    (folder / "meta.json").write_text(str(error.value).split(" all of it is: ")[-1])
    assert load_tokenizer(folder).decode([0]) == "!"
    for dtype in ("uint16", "uint32"):
        make_dataset(folder, dtype=dtype)
        (folder / "meta.json").write_text(json.dumps({"dtype": dtype, "vocab_size": 5}))
        with pytest.raises(UserError, match="contains token id 63, but meta.json says vocab_size 5"):
            inspected()
