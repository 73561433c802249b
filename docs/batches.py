"""Lists what batch_size='auto' chooses for each full config on one GPU of each size."""

from __future__ import annotations

from training.configuration.files_and_flags import load_config
from training.configuration.keys import ROOT
from training.memory.gpus import CARDS, card_memory
from training.memory.micro_batch import choose

GPUS = {"A6000": "48 GB", "H100": "80 GB", "H200": "141 GB", "B200": "180 GB"}
PUBLISHED = {  # tokens for 1.36e21 FLOPs, in 1e6
    "llama_1.36b": 84_720,
    "llama2_1.36b_b200_optimal": 84_720,
    "llama3_1.5b_optimal": 101_909,
    "llama3_2.2b_chinchilla": 61_545,
    "qwen3_1.8b_optimal": 81_727,
    "qwen3_1.8b_b200_optimal": 81_727,
}


def batches() -> str:
    """The table of TRAINING_GUIDE.md: batch_size x gradient_accumulation_steps, and the GiB needed."""
    columns = [f"{name}, {size}" for name, size in GPUS.items()]
    lines = [f"| config | tokens per iteration | {' | '.join(columns)} | published tokens | iterations |"]
    lines.append("|---" * (len(columns) + 4) + "|")
    for path in sorted(ROOT.glob("config/full_*.py")):
        config = load_config([str(path)])
        tokens = config.tokens_per_iter
        assert tokens is not None
        cells = [f"config/{path.name}", f"{tokens:,}"]
        for name in GPUS:
            numbers, found = choose(config, 1, card_memory(CARDS[name]))
            assert found.fits, (path, name)
            parts = f", {numbers.loss_chunks} parts" * (numbers.loss_chunks != 1)
            steps = numbers.gradient_accumulation_steps
            cells.append(f"{numbers.batch_size} x {steps}{parts}, {found.needed_gib:.1f}")
        published = PUBLISHED.get(path.stem.removeprefix("full_"), 0) * 10**6
        cells += [f"{published / 1e9:g} B", f"{-(-published // tokens):,}"] if published else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
