"""Weights go in and out tensor by tensor: no process holds the model a second time."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file
from support.helpers import launch, run_train
from support.hf_models import hf_run

from model_config import model_config
from training.pretrained.names import pieces
from training.pretrained.writing import write_architecture

MODEL = model_config(
    "qwen3", n_layer=8, n_head=8, n_embd=512, d_ff=2048, vocab_size=32_000, block_size=64, weight_tying=True
)
SHARD_TENSORS = 12
SLACK = 8 << 20  # bytes: threads, parsed headers, chunks on their way to a file


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A model of 200 MB in several files, without transformers."""
    folder = tmp_path_factory.mktemp("large") / "model"
    folder.mkdir()
    table, index = pieces(MODEL), {}
    generator = torch.Generator().manual_seed(0)
    shards = [table[i : i + SHARD_TENSORS] for i in range(0, len(table), SHARD_TENSORS)]
    for n, shard in enumerate(shards):
        name = f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file({p.name: 0.02 * torch.randn(p.shape, generator=generator) for p in shard}, folder / name)
        index |= {piece.name: name for piece in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(write_architecture(MODEL, "float32", {})))
    return folder


def bytes_of(found) -> int:
    return sum(4 * torch.Size(piece.shape).numel() for piece in found)


def limit(folder) -> int:
    """The largest shard and one tensor."""
    shard = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    return shard + max(bytes_of([piece]) for piece in pieces(MODEL)) + SLACK


def peak(*command) -> int:
    (output,) = launch([["tests/support/memory_worker.py", *command]])
    return int(re.search(r"^peak (\d+)$", output, re.M)[1])


def test_import_needs_the_model_once(large):
    whole = bytes_of(pieces(MODEL))
    assert whole > 190e6 and limit(large) < 0.8 * whole  # holding all of it would be seen
    more = peak("import", large) - whole
    assert -SLACK < more < limit(large)


@pytest.mark.slow
def test_export_needs_one_tensor_at_a_time(large, tmp_path):
    config = hf_run(tmp_path, max_iters=1, batch_size=1, block_size=64, out_dir=tmp_path / "out")
    done = run_train(config, f"--init_weights=hf:{large}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert peak("export", tmp_path / "out", tmp_path / "exported") < limit(large)
    assert (tmp_path / "exported/model.safetensors").stat().st_size > 190e6
