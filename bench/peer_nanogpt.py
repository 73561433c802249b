"""nanoGPT's own train.py training GPT-2 of our shape: https://github.com/karpathy/nanoGPT.

    python -m bench.peer_nanogpt --nanogpt=FOLDER config/full_gpt2_1.36b.py --max_iters=31 --eval_interval=0

Takes train.py's arguments, writes a configuration of nanoGPT with the same shape, batch and optimizer, and
runs its train.py unchanged in this process, in a folder of its own. Its loader draws windows at random places
of the same train.bin, and its GELU is the exact one, ours the tanh form. Times are those of its own log,
which here has a line for each iteration, so that each waits for the GPU; MFU is ours, by formula v3 of the
same peak. The last line is JSON, as that of bench.peer.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import model_builder
from bench.peer import memory, report
from bench.peers import check_folder, obstacle
from bench.process import end_with_status
from common.errors import UserError
from data.pipeline.meta_file import nanogpt_meta
from training.batches.sources import open_sources
from training.configuration.keys import TrainConfig
from training.hardware.gpu_monitor import watch_gpus
from training.pretrained.settings import load_run_config
from training.process.world import World, check_device, launch_info, machine_size

FOLDER = "--nanogpt="
COMMIT = "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"  # of the comparison in LOG.md
LINE = re.compile(r"iter (\d+): loss ([\d.]+|nan|inf), time ([\d.]+)ms")
DATASET = "peer"  # nanoGPT reads data/NAME/train.bin of the folder in which it runs


def main(argv: list[str]) -> int:
    folder = next((Path(word.removeprefix(FOLDER)) for word in argv if word.startswith(FOLDER)), None)
    check_folder(folder)
    assert folder is not None
    rank, local_rank, size = launch_info()
    config = load_run_config([word for word in argv if not word.startswith(FOLDER)], size)
    if reason := obstacle("nanogpt", config):
        raise UserError(f"bench.peer_nanogpt: {reason}")
    check_device(config)
    device = torch.device(config.device, local_rank) if config.device == "cuda" else torch.device("cpu")
    world = World(rank, local_rank, size, device, machine_size())
    sources = open_sources(config, scan=False)
    files = sources[0].splits["train"]
    if len(sources) > 1 or len(files.paths) != 1 or files.dtype.itemsize != 2:
        raise UserError(
            f"nanoGPT reads one train.bin of 16-bit tokens, and {config.dataset!r} is something else"
        )
    commit = commit_of(folder)  # before the training: what fails here must not lose its figures
    monitor, began = watch_gpus(world), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="nanomfu-") as scratch:
        prepare(Path(scratch), folder.resolve(), files.paths[0].resolve(), config, size)
        output = run(folder.resolve(), Path(scratch))
    clocks = monitor.take([(began, time.perf_counter())])  # of the whole run
    monitor.close()
    if rank:
        return 0  # nanoGPT logs on rank 0
    rows = parse(output)[: config.max_iters]
    if len(rows) < config.max_iters:
        raise UserError(
            f"nanoGPT logged {len(rows)} iterations of {config.max_iters}; its log has the reason"
        )
    rows = [{**row, "memory": memory(world), **clocks} for row in rows]
    facts = {
        "commit": commit,
        "parameters": model_builder.build_model(config.model_config()).count_parameters()["total"],
        "compile": config.compile,
        "attention": "sdpa, as nanoGPT calls it",
        "precision": f"{config.dtype}{' autocast' * (config.dtype == 'bfloat16')}, float32 weights",
    }
    print(json.dumps(report(config, world, f"nanoGPT {commit[:12]}{commit[40:]}", facts, rows)))
    return 0


def settings(config: TrainConfig, processes: int) -> dict[str, object]:
    """nanoGPT's configuration. It divides gradient_accumulation_steps among the processes."""
    model = config.model_config()
    return {
        "out_dir": "out",
        "eval_interval": 10**9,
        "eval_iters": 1,
        "log_interval": 1,
        "always_save_checkpoint": False,
        "dataset": DATASET,
        "batch_size": config.micro_batch,
        "gradient_accumulation_steps": config.micro_steps * processes,
        "block_size": config.block_size,
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_embd": model.n_embd,
        "dropout": model.dropout,
        "bias": model.bias,
        "learning_rate": config.learning_rate,
        "min_lr": config.min_lr,
        "weight_decay": config.weight_decay,
        "beta1": config.beta1,
        "beta2": config.beta2,
        "grad_clip": config.grad_clip,
        "warmup_iters": config.warmup_iters or 0,
        "lr_decay_iters": config.lr_decay_iters or config.max_iters,
        "max_iters": config.max_iters,
        "backend": "nccl" if config.device == "cuda" else "gloo",
        "device": config.device,
        "dtype": config.dtype,
        "compile": config.compile,
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
    """Its commit, and whether files were changed; a line says if it is not what LOG.md's figures are of."""

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
        except OSError:  # there is no git
            return ""
        return done.stdout.strip()

    own = git("rev-parse", "--show-toplevel") == str(folder.resolve())  # and not of a checkout around it
    commit = git("rev-parse", "HEAD") if own else "unknown"
    changed = " with changes" * bool(own and git("status", "--porcelain", "-uno"))
    if commit + changed != COMMIT:
        print(f"nanoGPT's commit is {commit[:12]}{changed}, and LOG.md's figures are of {COMMIT[:12]}")
    return commit + changed


if __name__ == "__main__":
    sys.exit(end_with_status(main, sys.argv[1:]))
