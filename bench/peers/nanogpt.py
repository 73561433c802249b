"""nanoGPT's own train.py training GPT-2 of our shape.

https://github.com/karpathy/nanoGPT
Writes a configuration of nanoGPT with our shape, batch and optimizer, and runs its train.py unchanged in this
process, in a folder of its own. Its loader draws windows at random places of the same train.bin, and its GELU
is the exact one, ours the tanh form. Times are those of its own log, which here has a line for each
iteration, so that each waits for the GPU.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import model_builder
from bench.peers.program import Program, memory, precision
from common.errors import UserError
from data.pipeline.meta_file import nanogpt_meta
from model_config import ModelConfig
from training.batches.sources import Source
from training.configuration.keys import AUTO, ROOT, TrainConfig
from training.hardware.gpu_monitor import watch_gpus
from training.process.launch import launch_info, machine_size
from training.process.world import World

FILES = ("train.py", "model.py", "configurator.py")
LINE = re.compile(r"iter (\d+): loss ([\d.]+|nan|inf), time ([\d.]+)ms")
# its keys that have our names and meanings
SAME = "block_size learning_rate min_lr weight_decay beta1 beta2 grad_clip max_iters device dtype compile"
DATASET = "peer"  # nanoGPT reads data/NAME/train.bin of the folder in which it runs


class NanoGPT(Program):
    name = "nanogpt"

    def options(self) -> list[str]:
        return [*super().options(), f"--nanogpt={self.folder}"]

    def require(self) -> None:
        if self.folder is None:
            raise UserError(
                "--peer=nanogpt runs nanoGPT's own train.py: git clone https://github.com/karpathy/nanoGPT, "
                "then --nanogpt=FOLDER"
            )
        if missing := [name for name in FILES if not (ROOT / self.folder / name).is_file()]:
            raise UserError(
                f"--nanogpt={self.folder} has no {', '.join(missing)}, so it is no checkout of nanoGPT"
            )

    def of_model(self, config: TrainConfig, model: ModelConfig) -> str | None:
        style = (model.position_encoding, model.normalization, model.ffn_type, model.activation)
        if style != ("learned", "layernorm", "mlp", "gelu") or not model.weight_tying:
            return f"nanoGPT has only GPT-2, not {model.arch}"
        if model.d_ff != 4 * model.n_embd or model.n_kv_head != model.n_head:
            return "nanoGPT's feed-forward is four times as wide as the model, and all its heads have keys"
        if model.vocab_size > 65536:
            return "nanoGPT reads tokens of 16 bits"
        if AUTO in (config.batch_size, config.gradient_accumulation_steps):
            return "nanoGPT needs numbers: state --batch_size and --gradient_accumulation_steps"
        return None

    def start(self, config: TrainConfig, sources: list[Source]) -> tuple[TrainConfig, World]:
        """nanoGPT's train.py makes the process group itself."""
        rank, local_rank, size = launch_info()
        device = torch.device(config.device, local_rank) if config.device == "cuda" else torch.device("cpu")
        return config, World(rank, local_rank, size, device, machine_size())

    def end(self, world: World) -> None:
        """It has left its process group, too."""

    def train(self, config: TrainConfig, world: World, sources: list[Source]) -> dict[str, Any]:
        assert self.folder is not None
        files = sources[0].splits["train"]
        if len(sources) > 1 or len(files.paths) != 1 or files.dtype.itemsize != 2:
            raise UserError(
                f"nanoGPT reads one train.bin of 16-bit tokens, and {config.dataset!r} is something else"
            )
        folder = (ROOT / self.folder).resolve()
        commit = commit_of(folder)  # before the training: what fails here must not lose its figures
        monitor, began = watch_gpus(world), time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="nanomfu-") as scratch:
            prepare(Path(scratch), folder, files.paths[0].resolve(), config, world.size)
            rows = parse(run(folder, Path(scratch)))[: config.max_iters]
        clocks = monitor.take([(began, time.perf_counter())])  # of the whole run
        monitor.close()
        if world.is_main and len(rows) < config.max_iters:  # the others log nothing
            raise UserError(
                f"nanoGPT logged {len(rows)} iterations of {config.max_iters}; its log has the reason"
            )
        return {
            "peer": f"nanoGPT {commit[:12]}{commit[40:]}",
            "commit": commit,
            "parameters": model_builder.build_model(config.model_config()).count_parameters()["total"],
            "compile": config.compile,
            "attention": "sdpa, as nanoGPT calls it",
            "precision": precision(config),
            "training_iterations": [{**row, "memory": memory(world), **clocks} for row in rows],
        }


def settings(config: TrainConfig, processes: int) -> dict[str, object]:
    """nanoGPT's configuration. It divides gradient_accumulation_steps among the processes."""
    model = config.model_config()
    return {
        **{name: getattr(model, name) for name in ("n_layer", "n_head", "n_embd", "dropout", "bias")},
        **{name: getattr(config, name) for name in SAME.split()},
        "out_dir": "out",
        "eval_interval": 10**9,
        "eval_iters": 1,
        "log_interval": 1,
        "always_save_checkpoint": False,
        "dataset": DATASET,
        "batch_size": config.micro_batch,
        "gradient_accumulation_steps": config.micro_steps * processes,
        "warmup_iters": config.warmup_iters or 0,
        "lr_decay_iters": config.lr_decay_iters or config.max_iters,
        "backend": "nccl" if config.device == "cuda" else "gloo",
    }


def prepare(scratch: Path, nanogpt: Path, tokens: Path, config: TrainConfig, processes: int) -> None:
    """The folder in which it runs: its configurator, our tokens, and our shape. It evaluates once, at the
    beginning, on val.bin, which is the same file here."""
    (scratch / "configurator.py").symlink_to(nanogpt / "configurator.py")
    data = scratch / "data" / DATASET
    data.mkdir(parents=True)
    for split in ("train", "val"):
        (data / f"{split}.bin").symlink_to(tokens)
    # in which nanoGPT looks for the size of its vocabulary
    (data / "meta.pkl").write_bytes(nanogpt_meta(config.model_config().vocab_size, {"kind": "none"}))
    lines = [f"{name} = {value!r}" for name, value in settings(config, processes).items()]
    (scratch / "settings.py").write_text("\n".join(lines) + "\n", encoding="utf-8")


class _Both(io.StringIO):
    """Keeps what is printed, and shows it."""

    def write(self, text: str) -> int:
        sys.__stdout__.write(text)  # type: ignore[union-attr]
        return super().write(text)


def run(nanogpt: Path, scratch: Path) -> str:
    """What its train.py prints. It is run as a script, with its own folder first among those of imports."""
    folder, argv, path, output = os.getcwd(), sys.argv, sys.path[:], _Both()
    ours = sys.modules.pop("model", None)  # it has a module of this name, too
    try:
        os.chdir(scratch)
        sys.argv = ["train.py", "settings.py"]
        sys.path.insert(0, str(nanogpt))
        with contextlib.redirect_stdout(output):
            runpy.run_path(str(nanogpt / "train.py"), run_name="__main__")
    finally:
        os.chdir(folder)
        sys.argv, sys.path[:] = argv, path
        if ours:
            sys.modules["model"] = ours
    return output.getvalue()


def parse(output: str) -> list[dict]:
    """Rows of its log, each of one iteration."""
    return [
        {"iter": int(number), "loss": float(loss), "time_ms": float(ms)}
        for number, loss, ms in LINE.findall(output)
    ]


def commit_of(folder: Path) -> str:
    """Its commit, and whether files were changed; 'unknown' if it is no checkout of its own."""
    if not (folder / ".git").exists():  # a checkout around it has another commit
        return "unknown"
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run([*command, "--dirty= with changes"], capture_output=True, text=True)
    except OSError:  # there is no git
        return "unknown"
    return done.stdout.strip() or "unknown"
