"""Times the casts of an emulated recipe at a model's shapes: what emulation adds to a micro-step.

    python -m bench.casts config/qwen3_1.7b.py --low_precision=nvfp4

A matrix is cast once for its two matmuls: x in the forward, dy in the backward. Weights are cast once an
iteration, which is not counted here. GB/s counts what must move: a matrix read once, both forms written once,
and for nvfp4 one more reading for the largest magnitudes. On a GPU, nvfp4's widest gradient is also timed
with other constants of ops/triton_kernels/nvfp4.py. The last line is one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import product

import torch

from bench.operations import seconds_per_call
from bench.process import end_with_status
from bench.roofline import HEAD, matmul_shapes
from common.errors import UserError
from ops.emulation import mxfp8_operand, nvfp4_amaxes, nvfp4_operand
from ops.quantization.random_bits import random_key
from training.configuration.keys import TrainConfig
from training.memory.micro_batch import resolve_micro_batch
from training.pretrained.settings import load_run_config
from training.process.world import World, check_device

WARPS, COLUMN_WORDS = (2, 4, 8), (1, 2)  # what sweep() tries
BYTES = {"mxfp8": 6, "nvfp4": 8}  # of an element: read once or twice in bf16, written twice


def main(argv: list[str]) -> int:
    config = load_run_config(argv)
    if config.low_precision not in BYTES:
        raise UserError(
            f"low_precision={config.low_precision!r} has no casts of emulation to time; set "
            f"--low_precision={' or '.join(BYTES)}"
        )
    check_device(config)
    device = torch.device(config.device)
    config, _ = resolve_micro_batch(config, World(0, 0, 1, device))
    tokens = config.micro_batch * config.block_size
    timed = {case: _seconds(config.low_precision, tokens, case, device) for case in _casts(config)}
    milliseconds = 1e3 * sum(count * timed[case] for case, count in _casts(config).items())
    for (operand, width), seconds in timed.items():
        print(_line(f"{operand:<2} {tokens:,} x {width:,}", seconds, tokens * width, config.low_precision))
    print(f"casts of a micro-step: {milliseconds:.1f} ms")
    found: dict[str, object] = {"casts_ms": milliseconds}
    if config.low_precision == "nvfp4" and device.type == "cuda":
        found["sweep"] = sweep(tokens, max(width for operand, width in timed if operand == "dy"), device)
    print(json.dumps(found))
    return 0


def _casts(config: TrainConfig) -> Counter:
    """How often a micro-step casts x and dy of which width."""
    found: Counter = Counter()
    for (name, inputs, outputs), count in matmul_shapes(config.model_config()).items():
        if name != HEAD or config.low_precision_scope == "layers_and_head":
            found["x", inputs] += count
            found["dy", outputs] += count
    return found


def _seconds(recipe: str, tokens: int, case: tuple[str, int], device: torch.device) -> float:
    """Of one cast of x or dy, with the pass before it."""
    operand, width = case
    x = torch.randn(tokens, width, dtype=torch.bfloat16, device=device)
    key = random_key(1337, device=device) if operand == "dy" else None

    def cast() -> object:
        return nvfp4_operand(x, nvfp4_amaxes(x), key) if recipe == "nvfp4" else mxfp8_operand(x)

    return seconds_per_call(cast, device)


def sweep(tokens: int, width: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of a gradient's cast, by what the kernels' constants are."""
    from ops.triton_kernels import nvfp4

    found: dict[str, float] = {}
    chosen = (nvfp4.WARPS, nvfp4.COLUMN_WORDS)
    for nvfp4.WARPS, nvfp4.COLUMN_WORDS in product(WARPS, COLUMN_WORDS):
        name = f"WARPS = {nvfp4.WARPS}, COLUMN_WORDS = {nvfp4.COLUMN_WORDS}"
        seconds = _seconds("nvfp4", tokens, ("dy", width), device)
        print(_line(name, seconds, tokens * width, "nvfp4"))
        found[name] = 1e3 * seconds
    nvfp4.WARPS, nvfp4.COLUMN_WORDS = chosen
    return found


def _line(name: str, seconds: float, elements: int, recipe: str) -> str:
    return f"{name:<32} {1e3 * seconds:8.3f} ms {BYTES[recipe] * elements / seconds / 1e9:8,.0f} GB/s"


if __name__ == "__main__":
    sys.exit(end_with_status(main, sys.argv[1:]))
