"""What a preparation prints last: what the dataset is, and the commands that train a model of fitting size on
it, plot the run and write text with it.

A model should see about 20 tokens per parameter (Hoffmann et al. 2022), and up to four epochs of a text teach
almost as much as new text (Muennighoff et al. 2023). A text of a few MB is small for both rules: it gets the
smallest model and four epochs. A CPU always gets the smallest model, and as many iterations as take minutes.
"""

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from data.folders import DATA_DIR, dataset_argument
from data.pipeline.meta_file import count_tokens, document_ends

TOKENS_PER_PARAMETER = 20
EPOCHS = 4
LEAST_ITERATIONS = 100
LARGE_TOKENS = 100_000_000  # from here on, a config of a billion parameters, on a GPU, has something to learn
VOCAB_MULTIPLE = 64  # keeps the logits matmul on the tiles of tensor cores


@dataclass(frozen=True)
class Size:
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

    def flags(self) -> list[str]:
        return [f"--{name}={value}" for name, value in vars(self).items()]


@dataclass(frozen=True)
class Device:
    """sizes: from small to large; the first is that of the config."""

    name: str
    config: str
    block_size: int
    sizes: tuple[Size, ...]
    most_iterations: int


CPU = Device("a CPU", "config/quickstart.py", 128, (Size(4, 4, 2, 192, 512, 2e-3, 2048),), 500)
GPU = Device(
    "one GPU",
    "config/own_text.py",
    1024,
    (
        Size(4, 4, 2, 192, 512, 2e-3, 1 << 14),
        Size(6, 6, 2, 384, 1024, 1e-3, 1 << 15),
        Size(8, 8, 4, 512, 1408, 1e-3, 1 << 16),
        Size(12, 12, 4, 768, 2048, 6e-4, 1 << 18),
        Size(20, 16, 8, 1024, 2816, 4e-4, 1 << 19),
    ),
    1_000_000,
)


def device_here() -> Device:
    """By nvidia-smi: to import torch takes seconds."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):  # torch would find none
        return CPU
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return CPU
    return GPU if any(line.startswith("GPU ") for line in done.stdout.splitlines()) else CPU


@dataclass(frozen=True)
class Plan:
    """A fitting model, and how long it trains."""

    device: Device
    size: Size
    vocab_size: int
    block_size: int
    iterations: int
    epochs: float


def fitting(meta: dict, device: Device) -> Plan:
    tokens = count_tokens(meta)
    vocab_size, block_size = meta["vocab_size"], device.block_size
    if device is GPU:
        vocab_size = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    fits = [s for s in device.sizes if TOKENS_PER_PARAMETER * s.parameters(vocab_size) <= tokens["train"]]
    size = fits[-1] if fits else device.sizes[0]
    wanted = min(TOKENS_PER_PARAMETER * size.parameters(vocab_size), EPOCHS * tokens["train"])
    iterations = min(max(LEAST_ITERATIONS, wanted // size.tokens_per_iter), device.most_iterations)
    while block_size > 1 and min(tokens.values()) <= block_size:  # a window needs one token more
        block_size //= 2
    epochs = iterations * size.tokens_per_iter / max(1, tokens["train"])
    return Plan(device, size, vocab_size, block_size, iterations, epochs)


def training_arguments(plan: Plan) -> list[str]:
    """For train.py, without the dataset and out_dir. What the config says already is left out."""
    size = [] if plan.size == plan.device.sizes[0] else plan.size.flags()
    block = [] if plan.block_size == plan.device.block_size else [f"--block_size={plan.block_size}"]
    return [
        plan.device.config,
        f"--vocab_size={plan.vocab_size}",
        *size,
        *block,
        f"--max_iters={plan.iterations}",
    ]


def report(meta: dict, folder: str | Path, config: str | None = None) -> None:
    """Prints where the dataset is, what it holds, and the commands that follow. config: a large model's, for
    datasets of its size."""
    tokens = ", ".join(f"{split} {count:,}" for split, count in count_tokens(meta).items())
    print(f"in     {Path(folder).resolve()}")
    print(f"tokens {tokens}, as {meta['dtype']}")
    print(f"vocab  {meta['vocab_size']:,}, {document_ends(meta)}")
    for name, line in next_lines(meta, folder, config, device_here()).items():
        print(f"{name:6} {line}")


def next_lines(meta: dict, folder: str | Path, config: str | None, device: Device) -> dict[str, str]:
    """{label: line}: what the model is, and the commands, from the folder where the user is, by the Python
    that runs now."""
    root, out_dir = DATA_DIR.parent, f"out-{Path(folder).resolve().name}"
    lines = {}
    if config is None or count_tokens(meta)["train"] < LARGE_TOKENS:
        plan = fitting(meta, device)
        lines["model"] = (
            f"{plan.size.parameters(plan.vocab_size) / 1e6:,.1f} M parameters, for {device.name}, "
            f"{plan.epochs:,.1f} epochs"
        )
        arguments = training_arguments(plan)
    else:
        arguments = [config]
    train = ["train.py", *arguments, f"--dataset={dataset_argument(folder)}", f"--out_dir={out_dir}"]
    python = _this_python(root)
    before = "" if Path.cwd() == root else f"cd {shlex.quote(str(root))} && "
    lines["next"] = before + shlex.join([python, *train])
    lines["plot"] = (
        before + f"{shlex.quote(python)} plots/plot_single_run.py {shlex.quote(out_dir)}/run_*.json"
    )
    lines["sample"] = before + shlex.join([python, "sample.py", f"--out_dir={out_dir}"])
    return lines


def _this_python(root: Path) -> str:
    """As short as the shell finds it: 'python', '.venv/bin/python', or the whole path."""
    this = Path(sys.executable)
    if (found := shutil.which("python")) and Path(found) == this:
        return "python"
    return str(this.relative_to(root) if this.is_relative_to(root) else this)
