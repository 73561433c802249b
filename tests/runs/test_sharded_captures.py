"""CUDA Graphs with ZeRO-1 and FSDP, on a CPU: two gloo processes, and a fake in place of CUDA.
tests/gpu/test_captured_sharding.py has the same with real captures."""

import json
import sys

import pytest
from support import warm_python
from support.helpers import ROOT, make_dataset


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What graphs_worker.py found, on each of two ranks."""
    folder = tmp_path_factory.mktemp("captures")
    dataset = make_dataset(folder / "tokens", train_tokens=100_000)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = warm_python.run(
        [*launcher, "tests/support/graphs_worker.py", str(dataset), str(folder / "results.json"), "cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "results.json").read_text())


ZERO1 = ["zero1", "zero1 fp8"]
FSDP = ["fsdp", "fsdp resharded", "fsdp fp8"]


@pytest.mark.parametrize("case", [*ZERO1, *FSDP])
def test_the_gate_compares_each_ranks_shard_and_the_run_is_the_eager_one(ranks, case):
    """With an evaluation and an iteration of another shape between the replays."""
    for rank in ranks:
        found = rank[case]
        assert found["choice"] == {"asked": "CUDA Graph", "used": "CUDA Graph", "reason": None}
        assert found["equal"] and found["replays"] > 5


@pytest.mark.parametrize("case", [*ZERO1, *FSDP])
def test_a_capture_and_each_replay_end_as_they_began(ranks, case):
    """Nothing is on its way and no weight is gathered, also after an evaluation and an eager iteration."""
    for rank in ranks:
        assert rank[case]["states"] == [[0, 0]]


def test_nothing_waits_for_what_a_failed_capture_has_sent(ranks):
    for rank in ranks:
        found = rank["failure"]
        assert found["equal"] and found["choice"]["used"] == "eager step"
        assert found["choice"]["reason"].startswith("rank 1: RuntimeError: operation not permitted")


def test_fsdp_goes_on_on_no_rank_if_a_capture_broke_off_on_one(ranks):
    for rank in ranks:
        assert rank["broken fsdp"] == (
            "CUDA Graph: the capture broke off (rank 1: RuntimeError: CUDA out of memory), and FSDP cannot "
            "go on after that; start again with --use_cuda_graphs=False"
        )
