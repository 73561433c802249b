"""packing='truncate': what the model and the loss see of a padded window, and when a packing is made again.
test_second_members.py shows that each document is in one window, and what is counted."""

import os
import time

import numpy as np
import pytest
import torch
from support.packed_tokens import EOT, T, files_of

from training.batches.document_starts import EndOfText
from training.batches.packing import pack_documents
from training.batches.windows import inputs_and_targets


@pytest.fixture
def folder(tmp_path):
    """Documents of up to 79 tokens in two shards."""
    ids = np.arange(1, 20_001)
    ids[np.cumsum(np.arange(1, 80))] = EOT
    for shard, part in enumerate(np.array_split(ids, 2)):
        part.astype("<u2").tofile(tmp_path / f"train_{shard:03d}.bin")
    return tmp_path


def test_padding_is_end_of_text_to_the_model_and_nothing_to_the_loss():
    x, y = inputs_and_targets(torch.tensor([[5, 6, EOT, ~EOT, ~EOT]]))
    assert x.tolist() == [[5, 6, EOT, EOT]]
    assert y.tolist() == [[6, EOT, -100, -100]]


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
