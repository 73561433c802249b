"""A function of the tests on every rank of one launch, because starting processes takes longer than most of
what ranks compute together.

    ranks.py MODULE:FUNCTION CONFIG.py [ARGUMENT ...]
"""

import importlib
import json
import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

import torch.distributed as dist
from support.helpers import launch, torchrun_command

from training.configuration.files_and_flags import load_config
from training.faults import liveness
from training.process.exit_status import end_process
from training.process.launch import launch_info
from training.process.world import another_connection, gather_objects, init_world, meet


def on_ranks(processes: int, function: str, config: Path, *arguments: object) -> list:
    """What function(world, config, *arguments) gave on each rank. Arguments arrive as texts."""
    launcher = torchrun_command(processes) if processes > 1 else []
    (output,) = launch([[*launcher, "tests/support/ranks.py", function, config, *arguments]])
    return json.loads(output.splitlines()[-1])


def meeting(store: dist.Store, name: str):
    """In place of liveness.meet(): ranks that have met meet again, where nothing has been said yet."""

    def meet_again(rank: int, about: str) -> dist.Store:
        found = dist.PrefixStore(name, another_connection(store))
        found.set(f"process/{rank}", about)
        return found

    return meet_again


def main(function: str, *arguments: str) -> None:
    rank, _, size = launch_info()
    store = meet(rank) if size > 1 else None
    liveness.meet = meeting(store, "run")
    world = init_world(load_config([arguments[0]], size), store)
    module, _, name = function.partition(":")
    sys.path.remove(str(Path(__file__).resolve().parent))  # where faults.py is, which is not tests/faults/
    everyone = gather_objects(getattr(importlib.import_module(module), name)(world, *arguments), world)
    if world.is_main:
        print("\n" + json.dumps(everyone), flush=True)
    end_process(world)


if __name__ == "__main__":
    main(*sys.argv[1:])
