"""A resume opens each file of a checkpoint a few times in all, and not once for each rank."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from support.checkpoint_parts import copies, in_processes, make_config, make_ranks, make_state

from training.checkpoints import loading, verification
from training.checkpoints.loading import load_checkpoint
from training.checkpoints.verification import damage, read_parts
from training.process import agreement
from training.process.world import ALONE

RANKS = 4

pytestmark = pytest.mark.resume


def test_the_headers_of_a_checkpoint_are_shared_among_the_ranks_that_load_it(tmp_path, monkeypatch):
    """A file for each rank: every rank read all of them, and rank 0 twice."""
    config = make_config(tmp_path / "out")
    savers = make_ranks(config, RANKS)
    assert in_processes(savers, 3) == [0] * RANKS
    (folder,) = (tmp_path / "out" / "checkpoints").glob("step-*")
    expected, opened, real = copies(savers[0].state), Counter(), verification.read_header

    def counted(path):
        opened[path.name] += 1
        return real(path)

    everyone = [read_parts(folder, rank, RANKS) for rank in range(RANKS)]
    monkeypatch.setattr(verification, "read_header", counted)
    monkeypatch.setattr(agreement, "gather_objects", lambda value, world: [value])
    monkeypatch.setattr(loading, "gather_objects", lambda mine, world: everyone)
    for rank in range(RANKS):
        state = make_state(config, seed=9, world=replace(ALONE, rank=rank, size=RANKS))
        before = opened.copy()
        load_checkpoint(folder, state)
        assert (opened - before).total() <= 1
        loaded = state.tensors().items()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded), rank
    files = {path.name for path in folder.glob("*.safetensors")}
    assert opened == dict.fromkeys(files, 1) and len(files) > 1
    assert damage(folder) == [] and set(opened.values()) == {2}, "rank 0 checks all of them before"
