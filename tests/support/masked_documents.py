"""A dataset of short documents, and runs over windows of them."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from support.helpers import TINY, last_run, make_dataset, run_train, write_config

from model_config import model_config

CPU, GPU = torch.device("cpu"), torch.device("cuda")


EOT, T = 3, 48


def small(preset: str, **overrides):
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "d_ff": 96, "vocab_size": 64, "block_size": T}
    return model_config(preset, **{**sizes, "n_kv_head": None if preset == "gpt2" else 2, **overrides})


def train(folder, out: str, *flags: str, processes: int = 1) -> dict:
    done = run_train(folder / "run.py", f"--out_dir={folder / out}", *flags, processes=processes)
    assert done.returncode == 0, done.stderr
    return last_run(folder / out)


def make_documents_run(folder: Path) -> Path:
    """A dataset whose documents are 1 to 40 tokens long, and a run over windows of 32 of them."""
    data = make_dataset(folder / "data")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        path = data / f"{split}.bin"
        ids = np.fromfile(path, "<u2")
        ids[ids == 0] = 1
        ids[np.cumsum(rng.integers(1, 40, len(ids) // 40))] = 0
        ids.tofile(path)
    meta = {"dtype": "uint16", "vocab_size": 64, "eot_id": 0, "tokenizer": {"name": "synthetic"}}
    (data / "meta.json").write_text(json.dumps(meta))
    write_config(folder / "run.py", **{**TINY, "dataset": data, "peak_tflops": 1.0, "max_iters": 8})
    return folder


def write_lengths(folder: Path, lengths: dict[str, list[int] | np.ndarray]) -> Path:
    """Stores the lengths of the documents of each token file beside it, in place of an end-of-text id."""
    meta = json.loads((folder / "meta.json").read_text()) | {"format": 2, "eot_id": None}
    for name, each in lengths.items():
        (path := folder / f"{name}.lengths").write_bytes(np.array(each, "<u4").tobytes())
        said = {"documents": len(each), "longest": int(max(each))}
        meta["files"][name]["lengths"] = {**said, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder
