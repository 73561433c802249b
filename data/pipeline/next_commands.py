"""What a preparation prints last: what the dataset is, and the commands that train a model of fitting size on
it, plot the run and write text with it.

A model should see about 20 tokens per parameter (Hoffmann et al. 2022), and up to four epochs of a text teach
almost as much as new text (Muennighoff et al. 2023). A text of a few MB is small for both rules: it gets the
smallest model and four epochs. A CPU always gets the smallest model, and as many iterations as take minutes.
"""

import os
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

from common.processes import python_name
from data.folders import DATA_DIR, dataset_argument
from data.pipeline.meta_file import count_tokens, document_ends

TOKENS_PER_PARAMETER = 20
EPOCHS = 4
LEAST_ITERATIONS = 100
LARGE_TOKENS = 100_000_000  # from here on, a config of a billion parameters, on a GPU, has something to learn
VOCAB_MULTIPLE = 64  # keeps the logits matmul on the tiles of tensor cores


class Size(NamedTuple):
    """A Qwen3 model, and how much it reads in one iteration."""

    n_layer: int
    n_head: int
    num_key_value_heads: int
    n_embd: int
    d_ff: int
    learning_rate: float
    tokens_per_iter: int

    def parameters(self, vocab_size: int) -> int:
        attention = 2 * self.n_embd**2 * (1 + self.num_key_value_heads / self.n_head)
        return 2 * vocab_size * self.n_embd + self.n_layer * int(attention + 3 * self.n_embd * self.d_ff)


class Device(NamedTuple):
    """sizes: from small to large; the first is that of the config."""

    name: str
    config: str
    block_size: int
    sizes: list[Size]
    most_iterations: int


CPU = Device("a CPU", "config/quickstart.py", 128, [Size(4, 4, 2, 192, 512, 2e-3, 2048)], 500)
GPU_SIZES = [
    Size(4, 4, 2, 192, 512, 2e-3, 1 << 14),
    Size(8, 8, 4, 512, 1408, 1e-3, 1 << 16),
    Size(12, 12, 4, 768, 2048, 6e-4, 1 << 18),
    Size(20, 16, 8, 1024, 2816, 4e-4, 1 << 19),
]
SFT_CONFIG = "config/sft_qwen3_0.6b.py"
GPU = Device("one GPU", "config/own_text.py", 1024, GPU_SIZES, 1_000_000)


def device_here() -> Device:
    """By nvidia-smi: to import torch takes seconds."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):  # torch would find none
        return CPU
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return CPU
    return GPU if any(line.startswith("GPU ") for line in done.stdout.splitlines()) else CPU


def fitting(meta: dict, device: Device) -> tuple[list[str], str]:
    """The arguments of train.py for a fitting model, without what its config says, and what the model is."""
    tokens, vocab_size, block_size = count_tokens(meta), meta["vocab_size"], device.block_size
    if device is GPU:
        vocab_size = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    fits = [s for s in device.sizes if TOKENS_PER_PARAMETER * s.parameters(vocab_size) <= tokens["train"]]
    size = fits[-1] if fits else device.sizes[0]
    parameters = size.parameters(vocab_size)
    wanted = min(TOKENS_PER_PARAMETER * parameters, EPOCHS * tokens["train"])
    iterations = min(max(LEAST_ITERATIONS, wanted // size.tokens_per_iter), device.most_iterations)
    while block_size > 1 and min(tokens.values()) <= block_size:  # a window needs one token more
        block_size //= 2
    epochs = iterations * size.tokens_per_iter / max(1, tokens["train"])
    flags = {"vocab_size": vocab_size, **(size._asdict() if size != device.sizes[0] else {})}
    flags |= {"block_size": block_size} if block_size != device.block_size else {}
    arguments = [f"--{name}={value}" for name, value in {**flags, "max_iters": iterations}.items()]
    model = f"{parameters / 1e6:,.1f} M parameters, for {device.name}, {epochs:,.1f} epochs"
    return [device.config, *arguments], model


def report(meta: dict, folder: str | Path, config: str | None = None) -> None:
    """Prints where the dataset is, what it holds, and the commands that follow. config: a large model's, for
    datasets of its size; of conversations, the weights to begin with."""
    tokens = ", ".join(f"{split} {count:,}" for split, count in count_tokens(meta).items())
    print(f"in     {Path(folder).resolve()}")
    print(f"tokens {tokens}, as {meta['dtype']}")
    print(f"vocab  {meta['vocab_size']:,}, {document_ends(meta)}")
    if "chat" in meta:
        share = meta["targets"] / sum(count_tokens(meta).values())
        left_out = f"{meta['cut']:,} cut, {meta['too_long']:,} too long"
        print(f"chat   {share:.1%} of the tokens are targets; {left_out}")
    for name, line in next_lines(meta, folder, config, device_here()).items():
        print(f"{name:6} {line}")


def next_lines(meta: dict, folder: str | Path, config: str | None, device: Device) -> dict[str, str]:
    """{label: line}: what the model is, and the commands, from the folder where the user is, by the Python
    that runs now."""
    out_dir, chat = f"out-{Path(folder).resolve().name}", ["--chat"] if "chat" in meta else []
    arguments, model = fitting(meta, device)
    lines = {"model": model}
    if chat:
        arguments, lines = [SFT_CONFIG, f"--init_weights={config}"], {}
    elif config is not None and count_tokens(meta)["train"] >= LARGE_TOKENS:
        arguments, lines = [config], {}
    train = ["train.py", *arguments, f"--dataset={dataset_argument(folder)}", f"--out_dir={out_dir}"]
    python, root = python_name(), DATA_DIR.parent
    before = "" if Path.cwd() == root else f"cd {shlex.quote(str(root))} && "
    lines["next"] = before + shlex.join([python, *train])
    plotted = f"plots/plot_single_run.py {shlex.quote(out_dir)}/run_*.json"
    lines["plot"] = f"{before}{shlex.quote(python)} {plotted}"
    lines["sample"] = before + shlex.join([python, "sample.py", f"--out_dir={out_dir}", *chat])
    return lines
