"""Times the attention of one layer by every kernel that runs here: forward, backward, and the first call, which
compiles.

    python -m bench.attention config/full_qwen3_1.8b_optimal.py

First windows of several lengths, then documents that do not see each other: as training masks them, and by
flash-attn 4's kernel for sequences of any length, which training does not use. TFLOPS are causal and count a
window as one document. The last line of the output is one line of JSON.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench.operations import ON_A_CPU, Timing, attention_inputs, time_attend
from bench.process import end_with_status
from bench.roofline import heat
from model import manual_attention
from ops.flash_attn_4 import PACKAGE
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.hardware.attention_kernels import CHAIN, choose_attention
from training.pretrained.settings import load_run_config
from training.process.exit_status import leave_now
from training.process.world import check_device

TOKENS, LENGTHS = 32768, (2048, 4096, 16384, 32768)
MASKED, DOCUMENT = 4096, 207  # tokens of a window, and of a document on average, as in docs/low_precision.md
VARLEN = "flash_attn_4, varlen"
ON_A_GPU = Timing(0.2, 0.05, 6)


def main(argv: list[str]) -> int:
    config = load_run_config(argv)
    check_device(config)
    heat(torch.device(config.device))
    cases = [(length, name, False) for length in LENGTHS for name in CHAIN[:-1]]
    cases += [(MASKED, name, True) for name in ("sdpa", VARLEN)]
    rows = []
    for length, name, documents in cases:
        sized = dataclasses.replace(config, block_size=length, batch_size=TOKENS // length)
        rows.append(
            {"tokens": length, "documents": documents, "asked": name, **measure(sized, name, documents)}
        )
        print(line(rows[-1]), flush=True)
    print(json.dumps(rows))
    return 0


def measure(config: TrainConfig, name: str, documents: bool) -> dict:
    """The kernel and its figures, or the reason why it does not run here."""
    device, dtype, model = torch.device(config.device), DTYPES[config.dtype], config.model_config()
    qkv = attention_inputs(config, model, dtype, device)
    starts = torch.rand(qkv[0].shape[:2], device=device) < 1 / DOCUMENT
    began = time.perf_counter()
    try:
        if name == VARLEN:
            kernel, attend = "flash-attn 4", _varlen(starts)
        else:
            choice = choose_attention(name, model, dtype, device, manual_attention, documents)
            if choice.used != name:
                return {"reason": choice.reason}
            mask = [choice.mask(starts.cumsum(-1, dtype=torch.int32))] if choice.mask else []
            kernel, attend = choice.kernel, lambda *qkv_and_dropout: choice.attend(*qkv_and_dropout, *mask)
        sum(float(each.sum()) for each in torch.autograd.grad(attend(*qkv, 0.0).sum(), qkv))  # waits
    except Exception as error:  # a kernel may fail in any way; the others are still timed
        return {"reason": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
    first = time.perf_counter() - began
    timing = ON_A_CPU if device.type == "cpu" else ON_A_GPU
    return {"kernel": kernel, "first_call_seconds": first, **time_attend(attend, qkv, timing)}


def _varlen(starts: torch.Tensor) -> Callable:
    """starts (B, T): where a document begins, beside the first token of each window."""
    B, T = starts.shape
    begins = (starts | (torch.arange(T, device=starts.device) == 0)).flatten().nonzero().flatten()
    edges = F.pad(begins, (0, 1), value=B * T).int()
    function = importlib.import_module(PACKAGE).flash_attn_varlen_func
    lengths = {"cu_seqlens_q": edges, "cu_seqlens_k": edges, "max_seqlen_q": T, "max_seqlen_k": T}

    def attend(q, k, v, dropout_p):
        return function(*(t.flatten(0, 1) for t in (q, k, v)), **lengths, causal=True)[0].unflatten(0, (B, T))

    return attend


def line(row: dict) -> str:
    """For a reader."""
    what = f"{row['tokens']:>6}{' in documents' * row['documents']}, {row['asked']}"
    if "reason" in row:
        return f"{what}: {row['reason']}"
    ms, rate = (row["seconds"][part] * 1e3 for part in ("forward", "backward")), row["causal_tflops"]
    times = " / ".join(f"{each:.3f}" for each in ms)
    rates = " / ".join(f"{each:.4g}" for each in rate.values())
    first = row["first_call_seconds"]
    return (
        f"{what} [{row['kernel']}]: {times} ms forward / backward, {rates} TFLOPS, first call {first:.1f} s"
    )


if __name__ == "__main__":
    leave_now(end_with_status(main, sys.argv[1:]))
