"""What several test files share: a tiny dataset, a tiny run's settings, and train.py as a user starts it."""

import contextlib
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import torch
from safetensors import safe_open
from support import warm_python

ROOT = Path(__file__).resolve().parents[2]
# After so many seconds, what a test waits for hangs: a busy machine may be 20 times slower than an idle one.
HANG_S = 600
WITHOUT_DATA = "no test data"  # begins the reason of a skip; conftest.py counts them

# What the full configs choose on one H200, stated: for tests of other things than that choice.
STATED = ("--batch_size=16", "--gradient_accumulation_steps=4")

# A Qwen3 that makes an iteration in about 10 ms on one CPU core; `dataset` and `out_dir` are the caller's.
TINY = {
    "device": "cpu",
    "dtype": "float32",
    "compile": False,
    "arch_preset": "qwen3",
    "n_layer": 2,
    "n_head": 4,
    "num_key_value_heads": 2,
    "n_embd": 32,
    "d_ff": 64,
    "vocab_size": 64,
    "block_size": 32,
    "batch_size": 4,
    "max_iters": 4,
    "eval_interval": 0,
    "eval_iters": 2,
    "eval_batch_size": 4,
    "log_interval": 1,
    "learning_rate": 1e-2,
    "min_lr": 1e-3,
    "warmup_iters": 2,
    "lr_decay_iters": 100,
}
# The same for a GPU: compiled, with shapes that its kernels take.
SMALL = {
    **TINY,
    "device": "cuda",
    "dtype": "bfloat16",
    "compile": True,
    "n_embd": 256,
    "d_ff": 512,
    "block_size": 128,
    "gradient_accumulation_steps": 2,
}
# the same, long enough to compare losses, with a checkpoint in the middle
SMALL_RUN = {
    **SMALL,
    "max_iters": 20,
    "eval_interval": 10,
    "warmup_iters": 5,
    "learning_rate": 1e-3,
    "min_lr": 1e-4,
    "keep_last": None,
}
STRATEGIES = {"ddp": [], "zero1": ["--use_zero1=True"], "fsdp": ["--use_fsdp=True"]}


def make_dataset(
    folder: Path,
    vocab_size: int = 64,
    train_tokens: int = 20_000,
    val_tokens: int = 4_000,
    dtype: str = "uint16",
    seed: int = 0,
    eot_id: int | None = None,
) -> Path:
    """train.bin, val.bin and meta.json in `folder`. The next id is one or two above the last, so the loss of
    a model that learns goes from ln(vocab_size) towards ln 2."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    files = {}
    for split, count in (("train", train_tokens), ("val", val_tokens)):
        ids = np.cumsum(rng.integers(1, 3, count)) % vocab_size
        path = folder / f"{split}.bin"
        ids.astype({"uint16": "<u2", "uint32": "<u4"}[dtype]).tofile(path)
        files[path.name] = {"tokens": count, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    meta = {"dtype": dtype, "vocab_size": vocab_size, "tokenizer": {"name": "synthetic"}, "files": files}
    if eot_id is not None:
        meta["eot_id"] = eot_id
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def write_config(path: Path, **keys) -> Path:
    """A config file that assigns `keys`; start from TINY with write_config(path, **{**TINY, ...})."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{key} = {(str(value) if isinstance(value, Path) else value)!r}" for key, value in keys.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def edit_json(path: Path, **fields) -> None:
    """Sets these fields of the object in a file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def last_run(out_dir: Path) -> dict:
    """The newest run record in out_dir."""
    paths = sorted(Path(out_dir).glob("run_*.json"), key=lambda path: path.stat().st_mtime_ns)
    assert paths, f"no run record in {out_dir}"
    return json.loads(paths[-1].read_text())


def losses(record: dict) -> list[float]:
    return [row["loss"] for row in record["training_iterations"]]


def evaluations(record: dict) -> list[tuple[int, float, float]]:
    """What the evaluations of a run found; their times and attempts differ between equal runs."""
    return [(step["iter"], step["train_loss"], step["val_loss"]) for step in record["eval_steps"]]


def checkpoint_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, read by the safetensors library and not by our code."""
    parts = {}  # name -> [(where it begins, part)]
    for path in sorted(Path(checkpoint).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():
                parts.setdefault(name, []).append((places[name]["saved_offsets"], file.get_tensor(name)))
    assert parts, f"no tensors in {checkpoint}"
    return {name: _assemble(found) for name, found in parts.items()}


def _assemble(parts: list[tuple[list[int], torch.Tensor]]) -> torch.Tensor:
    ends = [[start + size for start, size in zip(where, part.shape, strict=True)] for where, part in parts]
    whole = torch.empty([max(end) for end in zip(*ends, strict=True)], dtype=parts[0][1].dtype)
    for (where, part), end in zip(parts, ends, strict=True):
        whole[tuple(slice(*span) for span in zip(where, end, strict=True))] = part
    return whole


def start_train(
    *args: object,
    processes: int = 1,
    torchrun: Sequence[str] = (),
    script: str = "train.py",
    stdout: int | IO = subprocess.PIPE,
    stderr: int | IO = subprocess.PIPE,
    **env: str,
) -> subprocess.Popen:
    """train.py, or another script, as a user starts it, in a process group of its own: under torchrun if
    `processes` > 1 or it is given options. A pipe that nobody reads is full after some 160 rows, and then the
    run waits."""
    launcher = torchrun_command(processes, *torchrun) if processes > 1 or torchrun else []
    return warm_python.Popen(
        [sys.executable, *launcher, script, *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )


def torchrun_command(processes: int, *options: str) -> list[str]:
    """What stands behind `python`. Options that say where machines meet take the place of --standalone."""
    alone = [] if any(option.startswith("--nnodes") for option in options) else ["--standalone"]
    return ["-m", "torch.distributed.run", *alone, f"--nproc_per_node={processes}", *options]


def run_in_one_launch(
    folder: Path,
    commands: list[list],
    processes: int = 1,
    timeout: float = HANG_S,
    worker: str = "tests/support/runs_worker.py",
) -> None:
    """train.py with each argument list, by the same processes, one after another."""
    path = folder / f"commands-{uuid.uuid4().hex[:8]}.json"
    path.write_text(json.dumps([[str(argument) for argument in command] for command in commands]))
    launch([[*(torchrun_command(processes) if processes > 1 else []), worker, path]], timeout)


def launch(commands: list[list], timeout: float = HANG_S) -> list[str]:
    """Python with each argument list, side by side; what they printed. Kills all if one takes too long."""
    processes = [
        warm_python.Popen(
            [sys.executable, *map(str, command)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    for process, (_, stderr) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, stderr[-3000:]
    return [stdout for stdout, _ in outputs]


def run_train(*args: object, timeout: float = HANG_S, **options) -> subprocess.CompletedProcess:
    """start_train, waited for. A run that hangs is killed with its processes and raises TimeoutExpired."""
    process = start_train(*args, **options)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process, or of one that it starts, can grow beyond so many bytes: a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
