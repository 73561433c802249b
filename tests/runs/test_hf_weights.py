"""Runs that begin with Hugging Face weights learn what transformers learns, under every strategy, and go on
after a kill."""

import os
import signal
import time

import pytest
import torch
from support.helpers import checkpoint_tensors, last_run, run_in_one_launch, run_train, start_train
from support.hf_models import MODELS, copy, hf_run, logits_of, make, save, some_ids, tensors

from tools import export_hf
from training.batches.loader import Loader
from training.batches.sources import make_windows, open_sources
from training.optimization.schedule import learning_rate
from training.pretrained.settings import load_run_config
from training.process.world import World

ALONE = World(0, 0, 1, torch.device("cpu"))
STRATEGIES = {"ddp": [], "zero1": ["--use_zero1=True"], "fsdp": ["--use_fsdp=True"]}


def losses(out_dir) -> list[float]:
    return [row["loss"] for row in last_run(out_dir)["training_iterations"]]


def losses_of_transformers(model, config) -> list[float]:
    """Of its model, trained by torch.optim.AdamW with the same batches and rates."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2))
    loader = Loader(make_windows(open_sources(config, scan=True), config)["train"], config, ALONE)
    found = []
    for iteration in range(config.max_iters):
        x, y = loader.next()
        loss = model(input_ids=x[0], labels=y[0], shift_labels=y[0]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(iteration, config)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    loader.close()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_three_updates_change_the_loss_as_in_transformers(name, run, tmp_path):
    folder = save(name, tmp_path / "model", shards="20KB")
    config = hf_run(tmp_path, max_iters=4, learning_rate=1e-3)
    flags = [f"--init_weights=hf:{folder}", f"--out_dir={tmp_path / 'out'}", "--weight_decay=0.1"]
    assert run(config, *flags) == 0
    expected = losses_of_transformers(make(name).train(), load_run_config([str(config), *flags]))
    assert losses(tmp_path / "out") == pytest.approx(expected, abs=1e-4)
    assert expected[0] - expected[3] > 0.01  # the updates count
