"""A container or a job with less memory than the machine: the run uses what it may use, and says so."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import warm_python
from support.checkpoint_parts import ALONE, make_config, make_saver, make_state
from support.helpers import ROOT, TINY, last_run, make_dataset, write_config
from support.memory_limit import memory_limit

from training.checkpoints import saver as saver_module
from training.checkpoints.tensor_files import Part
from training.process.memory import GB

pytestmark = pytest.mark.saving

PARTS = [Part(f"part {number}", (0,), (1000,), torch.float32) for number in range(3)]
# 17 M parameters: 200 MB to copy for a checkpoint, 270 MB to train, and Python takes about 150 MB
MODEL = {
    "n_layer": 4,
    "n_embd": 768,
    "d_ff": 1024,
    "n_head": 4,
    "block_size": 32,
    "batch_size": 1,
    "max_iters": 2,
}


def test_in_a_container_too_small_for_a_copy_the_run_saves_synchronously_and_survives(tmp_path):
    make_dataset(tmp_path / "data")
    paths = {"dataset": tmp_path / "data", "out_dir": tmp_path / "out"}
    config = write_config(tmp_path / "run.py", **{**TINY, **MODEL, **paths, "use_dataloader": False})
    with memory_limit(tmp_path, 620_000_000) as limited:
        done = warm_python.run(
            [*limited, "train.py", str(config)], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr[-2000:]
    log = next(Path(tmp_path / "out").glob("run_*.log")).read_text()
    assert "async_checkpoint=True needs 0.2 GB of host memory besides" in log
    assert "training will wait while checkpoints are written" in log
    assert last_run(tmp_path / "out")["checkpoints"][-1]["iter"] == 2


def has_copy(config, monkeypatch, free: float, host_memory: float = 0.0, others: tuple = ()) -> bool:
    """Whether the first of eight ranks of a machine with so many free bytes takes memory for its copies.
    others: what ranks of other machines say."""
    monkeypatch.setattr(saver_module, "free_host_bytes", lambda: free)
    monkeypatch.setattr(saver_module, "gather_objects", lambda mine, world: [mine, *others])
    state = make_state(config, world=replace(ALONE, local_size=8))
    saver = make_saver(config, state)
    saver.host_memory = host_memory
    saver.prepare()
    return saver.staging is not None


def test_the_ranks_of_a_machine_need_memory_for_all_their_copies_and_decide_together(tmp_path, monkeypatch):
    config = make_config(tmp_path / "out")
    monkeypatch.setattr(saver_module, "plan_parts", lambda tensors, world: [PARTS])
    need = 8 * (sum(part.bytes for part in PARTS) + saver_module.HEADROOM)
    assert has_copy(config, monkeypatch, need)
    assert not has_copy(config, monkeypatch, need - 1)
    assert not has_copy(config, monkeypatch, need, others=((5, 5, 9),)), "another machine has no room"
    assert has_copy(config, monkeypatch, need, others=((5, 4, 9),))


def test_the_training_of_a_cpu_keeps_its_memory(tmp_path, monkeypatch):
    """What is copied is there already; the rest of what the training takes comes with the first iteration."""
    config = make_config(tmp_path / "out")
    monkeypatch.setattr(saver_module, "plan_parts", lambda tensors, world: [PARTS])
    copy = sum(part.bytes for part in PARTS)
    need = 8 * (copy + saver_module.HEADROOM + GB)
    assert has_copy(config, monkeypatch, need, host_memory=GB + copy)
    assert not has_copy(config, monkeypatch, need - 1, host_memory=GB + copy)
