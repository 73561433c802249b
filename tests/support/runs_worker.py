"""Run by helpers.run_in_one_launch, alone or under torchrun: train.py's main for several command lines, one
after another in one process group, because starting processes takes longer than a tiny run.

    runs_worker.py COMMANDS.json    a list of argument lists
"""

import gc
import json
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

import torch.distributed as dist
from support.counted_flops import once_a_model

import train
from training.faults import liveness
from training.pretrained.settings import load_run_config
from training.process.exit_status import end_process
from training.process.launch import launch_info
from training.process.world import another_connection, init_world, meet


def main(path: str) -> None:
    commands = json.loads(Path(path).read_text())
    rank, _, size = launch_info()
    store = meet(rank) if size > 1 else None
    first = [argument for argument in commands[0] if not argument.endswith("model.py")]
    world = init_world(load_run_config(first, size), store)
    train.init_world = lambda config, store: world
    train.end_process = lambda world, status=0: dist.barrier() if world.size > 1 else None
    train.count_flops = once_a_model(train.count_flops)
    train.gc = SimpleNamespace(collect=lambda: None, freeze=lambda: None)
    for n, command in enumerate(commands):

        def meet_again(rank, about, n=n):
            found = dist.PrefixStore(f"command {n}", another_connection(store))
            found.set(f"process/{rank}", about)
            return found

        liveness.meet = meet_again
        train.main(command)
        if n % 8 == 0:
            gc.collect()
    end_process(world)


if __name__ == "__main__":
    main(sys.argv[1])
