"""Run by tests/gpu/test_measured_algorithms.py: train.py that takes the last algorithm of every matmul, as if
it had won, after blocks that are short.

matmul_worker.py CONFIG.py --key=value ...
"""

import signal
import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

import train
from training.optimization import matmul_algorithms

matmul_algorithms.sure_winner = lambda blocks: len(blocks) - 1 if len(blocks) > 2 else None
matmul_algorithms.BLOCK_S = 0.002

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    train.leave_now(train.run(sys.argv[1:]))
