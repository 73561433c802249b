"""packing='truncate': each document is in one window, from its beginning; nothing of it is lost unless it is
longer than the window, and what is lost or padded is counted."""

import json
import os
import time

import numpy as np
import pytest
import torch
from support.helpers import TINY, last_run, run_train, write_config
from support.packed_tokens import EOT, VOCAB, T, files_of

from training.batches.document_starts import EndOfText
from training.batches.packing import PackedWindows, pack_documents
from training.batches.windows import inputs_and_targets


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """600 documents of 1 to 80 tokens in three shards; apart from the ends, no id is there twice."""
    folder = tmp_path_factory.mktemp("packing") / "data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 80, 600)
    ids = np.arange(1, lengths.sum() + 1)
    ids[np.cumsum(lengths) - 1] = EOT
    for shard, part in enumerate(np.array_split(ids, 3)):
        part.astype("<u2").tofile(folder / f"train_{shard:03d}.bin")
    ids[:500].astype("<u2").tofile(folder / "val_000.bin")
    meta = {"dtype": "uint16", "vocab_size": VOCAB, "eot_id": EOT, "tokenizer": {"name": "synthetic"}}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def windows_of(folder):
    tokens = files_of(folder)
    documents = EndOfText(tokens, EOT)
    return PackedWindows(documents, T, *pack_documents(documents, folder, "train", T))


def test_padding_is_end_of_text_to_the_model_and_nothing_to_the_loss():
    x, y = inputs_and_targets(torch.tensor([[5, 6, EOT, ~EOT, ~EOT]]))
    assert x.tolist() == [[5, 6, EOT, EOT]]
    assert y.tolist() == [[6, EOT, ~EOT, ~EOT]] and (y[0, 2:] < 0).all()


def test_packing_is_made_once_and_again_when_the_tokens_change_or_it_was_killed(folder):
    def packed():
        made, _ = pack_documents(EndOfText(files_of(folder), EOT), folder, "train", T)
        return made, (made / "index.json").stat().st_mtime_ns

    made, before = packed()
    assert packed() == (made, before)
    os.utime(folder / "train_001.bin", ns=(time.time_ns(), time.time_ns()))
    made, after = packed()
    assert after > before
    whole = (made / "pieces.bin").read_bytes()
    (made / "index.json").unlink()
    (made / "pieces.bin").write_bytes(whole[:100])
    assert (packed()[0] / "pieces.bin").read_bytes() == whole
    assert not list(folder.glob(".packed-*.tmp-*"))


def train(folder, out: str, *flags: str, processes: int = 1) -> dict:
    keys = {**TINY, "dataset": folder, "vocab_size": VOCAB, "packing": "truncate", "eval_interval": 4}
    config = write_config(folder.parent / "run.py", **keys)
    done = run_train(config, f"--out_dir={folder.parent / out}", *flags, processes=processes)
    assert done.returncode == 0, done.stderr
    return last_run(folder.parent / out)


@pytest.mark.slow
def test_runs_agree_whatever_reads_the_windows_and_on_how_many_processes(folder):
    one = train(folder, "one", "--gradient_accumulation_steps=2", "--doc_masking=True")
    more = ["--use_dataloader=True", "--doc_masking=True"]
    two = train(folder, "two", *more, processes=2)
    for mine, theirs in zip(one["training_iterations"], two["training_iterations"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert one["eval_steps"][-1]["val_loss"] == pytest.approx(two["eval_steps"][-1]["val_loss"], rel=1e-5)
    packing = one["startup_info"]["data"]["sources"][0]["packing"]
    assert packing["tokens_cut_off"] == windows_of(folder).description["tokens_cut_off"]
