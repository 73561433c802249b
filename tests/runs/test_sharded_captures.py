"""CUDA Graphs with ZeRO-1 and FSDP, on a CPU: two gloo processes, and a fake in place of CUDA.
tests/gpu/test_captured_sharding.py has the same with real captures."""

import json

import pytest
from support.helpers import launch, make_dataset


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What graphs_worker.py found, on each of two ranks."""
    folder = tmp_path_factory.mktemp("captures")
    dataset = make_dataset(folder / "tokens", train_tokens=100_000)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    worker = ["tests/support/graphs_worker.py", dataset, folder / "results.json", "cpu"]
    launch([[*launcher, *worker]])
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("case", ["zero1", "zero1 fp8", "fsdp", "fsdp resharded", "fsdp fp8"])
def test_the_gate_compares_each_ranks_shard_and_the_run_is_the_eager_one(ranks, case):
    """With an evaluation and an iteration of another shape between the replays, after which, too, nothing is
    on its way and no weight is gathered."""
    for rank in ranks:
        found = rank[case]
        assert found["choice"] == {"asked": "CUDA Graph", "used": "CUDA Graph", "reason": None}
        assert found["equal"] and found["replays"] > 5 and found["states"] == [[0, 0]]


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
