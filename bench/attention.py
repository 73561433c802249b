"""Times one layer's attention by every kernel that runs here, to choose a default.

    python -m bench.attention config/full_qwen3_1.8b_optimal.py

First windows of several lengths; then documents that do not see each other. TFLOPS are causal and count a
window as one document. One line of JSON for each kernel: its seconds with the first run include what it
compiles. A CPU has short windows, to try the command.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import torch

from bench.operations import ON_A_CPU, Timing, time_attention
from bench.process import end_with_status
from bench.roofline import heat
from model import manual_attention
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.hardware.attention_kernels import CHAIN, choose_attention
from training.hardware.capability import FA4
from training.pretrained.settings import load_run_config
from training.process.exit_status import leave_now
from training.process.world import check_device

LENGTHS, MASKED = (2048, 4096, 16384, 32768), 4096  # tokens of a window; of one with documents
DOCUMENT = 207  # tokens on average, as in docs/low_precision.md


def main(argv: list[str]) -> int:
    config = load_run_config(argv)
    check_device(config)
    lengths, masked = ((64, 128), 64) if config.device == "cpu" else (LENGTHS, MASKED)
    heat(torch.device(config.device))
    cases = [(length, name, False) for length in lengths for name in CHAIN[:-1]]
    for length, name, documents in [*cases, (masked, "sdpa", True), (masked, FA4, True)]:
        sized = dataclasses.replace(config, block_size=length, batch_size=lengths[-1] // length)
        try:
            found = measure(sized, name, documents)
        except Exception as error:  # a kernel may fail in any way; the others are still timed
            found = {"reason": repr(error)}
        print(json.dumps({"tokens": length, "documents": documents, "asked": name, **found}), flush=True)
    return 0


def measure(config: TrainConfig, name: str, documents: bool) -> dict:
    """The kernel and its figures, or the reason why it does not run here."""
    device, dtype, began = torch.device(config.device), DTYPES[config.dtype], time.perf_counter()
    starts = torch.rand(config.micro_batch, config.block_size, device=device) < 1 / DOCUMENT
    choice = choose_attention(name, config.model_config(), dtype, device, manual_attention, documents)
    if choice.used != name:
        return {"reason": choice.reason}
    if choice.mask:
        masked, mask = choice.attend, choice.mask(starts.cumsum(-1, dtype=torch.int32))
        choice = dataclasses.replace(choice, attend=lambda *qkv: masked(*qkv, mask))
    timing = ON_A_CPU if config.device == "cpu" else Timing(0.2, 0.05, 6)
    found = time_attention(config, config.model_config(), dtype, device, timing, choice)
    return {**found, "with_first_run_seconds": time.perf_counter() - began}


if __name__ == "__main__":
    leave_now(end_with_status(main, sys.argv[1:]))
