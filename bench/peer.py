"""Another program training the same model: a comparison with what anyone can run (docs/bench.md, Peers).

    python -m bench.peer config/full_qwen3_1.8b_optimal.py --max_iters=31 --log_interval=5 --eval_interval=0
    python -m bench.peer --peer=liger config/full_qwen3_1.8b_optimal.py --max_iters=31 --log_interval=5

Takes train.py's arguments. The number of parameters must equal ours; batches, optimizer and schedule are
ours. Keys for which the program has nothing similar have no effect if they change only how the work is done
(strategies, attention backends); the others are refused. The last line of the output is JSON with rows as in
a run record.
"""

from __future__ import annotations

import argparse
import json
import sys

from bench.peers.hugging_face import Liger, Transformers
from bench.peers.program import Program, report
from bench.peers.torchtitan import Torchtitan
from bench.process import end_with_status
from common.errors import UserError
from training.batches.fingerprint import agree_on_data
from training.batches.sources import open_sources
from training.configuration.flags import take_flags
from training.memory.micro_batch import resolve_micro_batch
from training.pretrained.settings import load_run_config
from training.process.launch import launch_info
from training.process.world import check_device

PEERS: dict[str, type[Program]] = {each.name: each for each in (Transformers, Liger, Torchtitan)}


def main(argv: list[str]) -> int:
    options, arguments = parse(argv)
    rank, _, size = launch_info()
    (program,) = require([options.peer])
    config = load_run_config(arguments, size)
    if reason := program.obstacle(config):
        raise UserError(f"--peer={program.name}: {reason}")
    check_device(config)
    sources = open_sources(config, scan=rank == 0)
    world = program.join(config)
    config, _ = resolve_micro_batch(config, world)  # numbers in place of 'auto', as train.py would choose
    agree_on_data(sources, world)
    found = program.train(config, world, sources)
    if world.is_main:
        print(json.dumps(report(config, world, found)))
    program.end(world)
    return 0


def require(names: list[str]) -> list[Program]:
    """The programs. Raises UserError if one is unknown or not installed."""
    for name in names:
        if name not in PEERS:
            removed = ", which was removed; its own train.py times its iterations" * (name == "nanogpt")
            raise UserError(f"--peer: {name!r} is not one of {', '.join(PEERS)}{removed}")
        PEERS[name]().require()
    return [PEERS[name]() for name in names]


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser("python -m bench.peer", description=about, allow_abbrev=False)
    parser.add_argument("--peer", default="transformers", help=f"{', '.join(PEERS)} (transformers)")
    flags, rest = take_flags(argv)
    options, unknown = parser.parse_known_args(rest)
    return options, unknown + flags


if __name__ == "__main__":
    sys.exit(end_with_status(main, sys.argv[1:]))
