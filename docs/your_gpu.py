"""Lists for each GPU, alone and as eight, the largest model of ours that fits, and how long it trains."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from common.errors import UserError
from tools.plan import HOFFMANN, parameters
from training.configuration.batch import is_auto
from training.configuration.files_and_flags import load_config
from training.configuration.keys import AUTO, ROOT, TrainConfig
from training.configuration.rules import check
from training.hardware.peaks import table_peak
from training.memory.gpus import CARDS, card_memory
from training.memory.micro_batch import FSDP, NUMBERS, choose, remedies
from training.records.expected_time import ASSUMED, expected_speed
from training.records.utilization import count_flops

GPUS = (
    *("RTX-3090", "RTX-4090", "RTX-5090", "A100-40GB", "L40S", "A6000", "A100", "H100-PCIe", "H100"),
    *("H100-NVL", "H200", "B200", "GB200", "B300"),
)
MODELS = ("qwen3_4b", "full_llama3_2.2b_chinchilla", "full_qwen3_1.8b_optimal", "train_gpt2_124m")
CONFIGS = {model: load_config([str(ROOT / "config" / f"{model}.py")]) for model in MODELS}  # largest first
TOKENS = 10e9
INTRODUCTION = f"""\
For your GPU and config, in seconds and without a GPU, also with the price of a GPU for an hour:

```sh
python train.py config/full_qwen3_1.8b_optimal.py --dry_run=True --gpu=H100 --price=2.50
```

With several: `WORLD_SIZE=8 python train.py ...`. The tables show the largest config that fits
[by the estimate of memory](tuning.md), with the mildest settings that make it fit.

- **batch**: batch_size x gradient_accumulation_steps of each GPU.
- **tokens/s** is of all GPUs, from an MFU. Those marked **m** were measured on one such GPU with Qwen3 1.8B;
  all others assume {ASSUMED:g} %. Recomputation is taken off. Eight GPUs are not measured; on cards without
  NVLink, exchanging takes longer than this assumes.
- **hours** are of {TOKENS / 1e9:g} B tokens, without evaluations. Cost = hours x GPUs x price of a GPU-hour.
- **loss** after {TOKENS / 1e9:g} B tokens is [the plan's](plan.md), which was fitted to other data."""


_flops = functools.cache(lambda model: count_flops(CONFIGS[model]))  # its audit takes seconds


def your_gpu() -> str:
    parts = [INTRODUCTION]
    for count, title in ((1, "One GPU"), (8, "Eight GPUs")):
        lines = ["|GPU|config|settings|batch|MFU %|tokens/s|hours|loss|", "|---" * 8 + "|"]
        lines += [f"|{'|'.join(_row(name, count))}|" for name in GPUS]
        parts += [f"## {title}", "\n".join(lines)]
    return "\n\n".join(parts)


def _row(name: str, count: int) -> list[str]:
    model, config, changed = next(_fitting(name, count))
    size = parameters(config.model_config())
    device = CARDS[name].device
    peak = table_peak(device, "bfloat16").tflops
    assert peak is not None, name
    speed = expected_speed(config, _flops(model), size, device, peak, count)
    assert speed is not None, name
    measured = " **m**" * speed.source.startswith("measured")
    return [
        name,
        model,
        " ".join(f"{key}={value}" for key, value in changed.items()) or "-",
        f"{config.batch_size}x{config.gradient_accumulation_steps}",
        f"{speed.mfu_percent:.0f}{measured}",
        f"{speed.tokens_per_sec:,.0f}",
        f"{TOKENS / speed.tokens_per_sec / 3600:,.0f}",
        f"{HOFFMANN.loss(size, TOKENS):.2f}",
    ]


def _fitting(name: str, count: int) -> Iterator[tuple[str, TrainConfig, dict[str, Any]]]:
    """(model, its settings with numbers, what was changed) of what fits, the largest and mildest first."""
    memory = card_memory(CARDS[name])
    for model, config in CONFIGS.items():
        changes = remedies(config)
        if count > 1:
            changes = [{}, {"use_zero1": True}, *(FSDP | remedy for remedy in changes)]
        if not is_auto(config):
            free: dict[str, Any] = dict.fromkeys(NUMBERS, AUTO)
            tokens = config.samples_per_iter(count) * config.block_size
            config = replace(config, tokens_per_iter=tokens, **free)
        for change in changes:
            changed = {key: value for key, value in change.items() if getattr(config, key) != value}
            wanted = replace(config, **changed)
            try:
                check(wanted, count)
            except UserError:
                continue
            numbers, found = choose(wanted, count, memory)
            if found.fits:
                yield model, numbers, changed
