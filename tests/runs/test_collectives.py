"""How often an iteration communicates, by strategy and optimizer. FSDP's weights are DTensors: an operation
on one of them may gather it without a word, and would be counted here."""

import json

import pytest
from support.helpers import TINY, launch, make_dataset, torchrun_command, write_config

LAYERS, MATRICES = 2, 2 * 4 + 2  # qkv, out, up and down of each block, embedding, head
NORM = 1  # the gradient's norm, of shards, with the loss
STEPS = {
    "single": {},
    # head, each block, and the embedding with the loss
    "ddp": {"allreduce": LAYERS + 2},
    # each matrix there and back; the vectors of head and blocks
    "zero1": {
        "reduce_scatter_base": MATRICES,
        "allreduce": LAYERS + 1 + NORM,
        "allgather_base": MATRICES,
    },
    # each block, head, embedding; weights are gathered once for all micro-steps
    "fsdp": {"allgather_base": LAYERS + 2, "reduce_scatter_base": LAYERS + 2, "allreduce": NORM},
}
TO_OWNERS_AND_BACK = {"alltoall_base": 2}  # Muon's, where rows are shared


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collectives")
    keys = {**TINY, "n_layer": LAYERS, "gradient_accumulation_steps": 2}
    config = write_config(folder / "run.py", **keys, dataset=make_dataset(folder / "tokens"))
    (output,) = launch([[*torchrun_command(2), "tests/support/collectives_worker.py", config]])
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("strategy", STEPS)
def test_an_iteration_has_these_collectives_and_no_others(counted, strategy, optimizer):
    shares_rows = optimizer == "muon" and strategy in ("zero1", "fsdp")
    assert counted[f"{strategy} {optimizer}"] == STEPS[strategy] | (TO_OWNERS_AND_BACK if shares_rows else {})
