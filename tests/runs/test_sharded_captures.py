"""CUDA Graphs with ZeRO-1, on a CPU: two gloo processes, and a fake in place of CUDA that runs the step itself.
tests/gpu/test_sharded_captures_on_gpus.py has the same with real captures."""

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
        [*launcher, "tests/support/graphs_worker.py", str(dataset), str(folder / "results.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("case", ["plain", "overlapped", "overlapped fp8"])
def test_the_gate_compares_each_ranks_shard_and_the_run_is_the_eager_one(ranks, case):
    """With an evaluation and an iteration of another shape between the replays."""
    for rank in ranks:
        found = rank[case]
        assert found["choice"] == {"asked": "CUDA Graph", "used": "CUDA Graph", "reason": None}
        assert found["equal"] and found["replays"] > 10


@pytest.mark.parametrize("case", ["plain", "overlapped", "overlapped fp8"])
def test_weights_arrive_in_the_capture_that_sends_them(ranks, case):
    """Also those that an eager step between replays has left on their way."""
    assert not any(rank[case]["on their way"] for rank in ranks)


def test_nothing_waits_for_what_a_failed_capture_has_sent(ranks):
    for rank in ranks:
        found = rank["failure"]
        assert found["equal"] and found["choice"]["used"] == "eager step"
        assert found["choice"]["reason"].startswith("rank 1: RuntimeError: operation not permitted")
