"""train.py on GPUs, with the settings of a folder's run.py; and what a test on GPUs needs."""

import pytest
import torch
from support.helpers import last_run, run_train

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
STRATEGIES = {"ddp": [], "zero1": ["--use_zero1=True"], "fsdp": ["--use_fsdp=True"]}


def needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs fp8 matmuls")


def train(folder, out: str, *flags: str, config: str = "run.py", processes: int = 1, **env: str) -> dict:
    """The record of a run in folder / out."""
    arguments = folder / config, f"--out_dir={folder / out}", *flags
    done = run_train(*arguments, processes=processes, **env)
    assert done.returncode == 0, done.stderr[-3000:]
    return last_run(folder / out)


def losses(record: dict) -> list[float]:
    return [row["loss"] for row in record["training_iterations"]]
