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

from bench.peers.program import report
from bench.peers.registry import PEERS, require
from bench.process import end_with_status
from common.errors import UserError
from training.batches.sources import open_sources
from training.configuration.flags import take_flags
from training.pretrained.settings import load_run_config
from training.process.launch import launch_info
from training.process.world import check_device


def main(argv: list[str]) -> int:
    options, arguments = parse(argv)
    rank, _, size = launch_info()
    (program,) = require([options.peer])
    config = load_run_config(arguments, size)
    if reason := program.obstacle(config, size):
        raise UserError(f"--peer={program.name}: {reason}")
    check_device(config)
    sources = open_sources(config, scan=rank == 0)
    config, world = program.start(config, sources)
    found = program.train(config, world, sources)
    rows = found.pop("training_iterations")
    if world.is_main:
        print(json.dumps(report(config, world, found, rows)))
    program.end(world)
    return 0


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peer", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--peer", default="transformers", help=f"{', '.join(PEERS)} (transformers)")
    flags, rest = take_flags(argv)
    options, unknown = parser.parse_known_args(rest)
    return options, unknown + flags


if __name__ == "__main__":
    sys.exit(end_with_status(main, sys.argv[1:]))
