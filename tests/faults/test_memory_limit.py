"""Memory for a copy of what is saved: a machine's ranks need it for all of theirs, and decide together."""

from dataclasses import replace

import pytest
import torch
from support.checkpoint_parts import ALONE, make_config, make_saver, make_state

from training.checkpoints import saver as saver_module
from training.checkpoints.tensor_files import Part
from training.process.memory import GB

pytestmark = pytest.mark.saving

PARTS = [Part(f"part {number}", (0,), (1000,), torch.float32) for number in range(3)]
COPY = sum(part.bytes for part in PARTS)


@pytest.fixture
def has_copy(tmp_path, monkeypatch):
    """has_copy(free): whether the first of eight ranks of a machine with so many free bytes takes memory for
    its copies. others: what ranks of other machines say."""
    monkeypatch.setattr(saver_module, "plan_parts", lambda *_: (PARTS, COPY))
    config = make_config(tmp_path / "out")

    def has_copy(free: float, host_memory: float = 0.0, others: tuple = ()) -> bool:
        monkeypatch.setattr(saver_module, "free_host_bytes", lambda: free)
        monkeypatch.setattr(saver_module, "gather_objects", lambda mine, world: [mine, *others])
        saver = make_saver(config, make_state(config, world=replace(ALONE, local_size=8)))
        saver.host_memory = host_memory
        saver.prepare()
        return saver.staging is not None

    return has_copy


def test_the_ranks_of_a_machine_need_memory_for_all_their_copies_and_decide_together(has_copy):
    need = 8 * (COPY + saver_module.HEADROOM)
    assert has_copy(need) and not has_copy(need - 1)
    assert not has_copy(need, others=((5, 5, 9),)), "another machine has no room"
    assert has_copy(need, others=((5, 4, 9),))


def test_the_training_of_a_cpu_keeps_its_memory(has_copy):
    """What is copied is there already; the rest of what the training takes comes with the first iteration."""
    need = 8 * (COPY + saver_module.HEADROOM + GB)
    assert has_copy(need, host_memory=GB + COPY) and not has_copy(need - 1, host_memory=GB + COPY)
