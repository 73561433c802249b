"""Run by tests/runs/test_collectives.py under torchrun: prints, as JSON, how often an iteration calls each
collective, for every strategy and optimizer.

    collectives_worker.py CONFIG [--KEY=VALUE ...]
"""

import collections
import json
import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

from support.graphed_runs import build_run
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from training.configuration.files_and_flags import load_config
from training.process.exit_status import end_process
from training.process.launch import launch_info
from training.process.world import World, init_world

STRATEGIES = {"single": [], "ddp": [], "zero1": ["--use_zero1=True"], "fsdp": ["--use_fsdp=True"]}


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


def counted(settings: list[str], world: World) -> dict[str, int]:
    parts = build_run(settings, world)
    parts.step(*parts.loader.next(), 1e-2)  # the first iteration also sets up what later ones use
    with Collectives() as found:
        parts.step(*parts.loader.next(), 1e-2)
    parts.loader.close()
    return dict(found.counts)


def main(settings: list[str]) -> None:
    world = init_world(load_config(settings, launch_info()[2]))
    alone, found = World(0, 0, 1, world.device), {}
    for name, flags in STRATEGIES.items():
        for optimizer in ("adamw", "muon"):
            where = alone if name == "single" else world
            found[f"{name} {optimizer}"] = counted([*settings, *flags, f"--optimizer={optimizer}"], where)
    if world.is_main:
        print(json.dumps(found), flush=True)
    end_process(world)


if __name__ == "__main__":
    main(sys.argv[1:])
