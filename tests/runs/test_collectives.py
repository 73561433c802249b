"""How often an iteration communicates, by strategy and optimizer. FSDP's weights are DTensors: an operation
on one of them may gather it without a word, and would be counted here."""

import collections

import pytest
from support.graphed_runs import build_run
from support.helpers import STRATEGIES, TINY, make_dataset, write_config
from support.ranks import on_ranks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from training.process.world import World

LAYERS, MATRICES = 2, 2 * 4 + 2  # qkv, out, up and down of each block, embedding, head
NORM = 1  # the gradient's norm, of shards, with the loss
STEPS = {
    "single": {},
    # head, each block, and the embedding with the loss
    "ddp": {"allreduce": LAYERS + 2},
    # each matrix there and back; the vectors of head and blocks
    "zero1": {"reduce_scatter_base": MATRICES, "allreduce": LAYERS + 1 + NORM, "allgather_base": MATRICES},
    # each block, head, embedding; weights are gathered once for all micro-steps
    "fsdp": {"allgather_base": LAYERS + 2, "reduce_scatter_base": LAYERS + 2, "allreduce": NORM},
}
TO_OWNERS_AND_BACK = {"alltoall_base": 2}  # Muon's, where rows are shared


class Collectives(TorchDispatchMode):
    """Counts them. CommDebugMode also puts hooks on modules, which FSDP does not bear."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does comes back here, with plain tensors
        if function.namespace in ("c10d", "_c10d_functional") and "wait" not in function.__name__:
            self.counts[function.__name__.partition(".")[0].strip("_")] += 1
        return function(*args, **kwargs or {})


def counts(world: World, config: str) -> dict[str, dict[str, int]]:
    """How often an iteration calls each collective, on a rank."""
    found = {}
    for name, flags in {"single": [], **STRATEGIES}.items():
        for optimizer in ("adamw", "muon"):
            where = World(0, 0, 1, world.device) if name == "single" else world
            parts = build_run([config, *flags, f"--optimizer={optimizer}"], where)
            parts.step(*parts.loader.next(), 1e-2)  # the first iteration also sets up what later ones use
            with Collectives() as collectives:
                parts.step(*parts.loader.next(), 1e-2)
            parts.loader.close()
            found[f"{name} {optimizer}"] = dict(collectives.counts)
    return found


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collectives")
    keys = {**TINY, "n_layer": LAYERS, "gradient_accumulation_steps": 2}
    config = write_config(folder / "run.py", **keys, dataset=make_dataset(folder / "tokens"))
    return on_ranks(2, "runs.test_collectives:counts", config)[0]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("strategy", STEPS)
def test_an_iteration_has_these_collectives_and_no_others(counted, strategy, optimizer):
    shares_rows = optimizer == "muon" and strategy in ("zero1", "fsdp")
    assert counted[f"{strategy} {optimizer}"] == STEPS[strategy] | (TO_OWNERS_AND_BACK if shares_rows else {})
