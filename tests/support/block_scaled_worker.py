"""Run by test_block_scaled.py under torchrun, two processes: train.py where tensor cores multiply
scaled blocks, on rank 1 with a wrong scale.

block_scaled_worker.py COMMANDS.json
"""

import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

from support import runs_worker, scaled_matmuls

from training.process.launch import launch_info

if __name__ == "__main__":
    rank, _, _ = launch_info()
    scaled_matmuls.use(setattr, scaled_matmuls.wrong_scale if rank == 1 else scaled_matmuls.exact)
    runs_worker.main(sys.argv[1])
