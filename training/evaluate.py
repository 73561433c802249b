"""Evaluation on fixed windows, the same for every strategy and world size, so that losses can be compared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from training.config import TrainConfig
from training.distributed import World, sum_over_ranks
from training.loader import Windows, hash_seed, permute

EVAL_STREAM = 2**32 - 1  # a stream that no epoch reaches


def evaluate(
    model,
    windows: dict[str, Windows],
    config: TrainConfig,
    world: World,
    check: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """{split: mean loss} over eval_iters batches of batch_size sequences per split. All ranks. `check` is
    called before each batch and may raise.

    Batch i is rank (i mod world size)'s. Every rank makes equally many forward passes, because with FSDP each
    of them communicates; the surplus ones count for nothing.
    """
    model.eval()
    losses = {split: _split_loss(model, part, config, world, check) for split, part in windows.items()}
    model.train()
    return losses


@torch.no_grad()
def _split_loss(model, windows: Windows, config: TrainConfig, world: World, check) -> float:
    batches = eval_batches(windows, config)
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for first in range(0, len(batches), world.size):
        check()
        mine = first + world.rank
        tokens = torch.from_numpy(windows.read(batches[min(mine, len(batches) - 1)])).to(world.device)
        loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        total += loss * (mine < len(batches))
    return (sum_over_ranks(total, world) / len(batches)).item()  # sync point


def eval_batches(windows: Windows, config: TrainConfig) -> np.ndarray:
    """(batches, batch_size) window indices: at most eval_iters batches, no window twice. A split with fewer
    windows than one batch repeats them to fill it."""
    B = config.batch_size
    batches = max(1, min(config.eval_iters, windows.count // B))
    order = np.arange(batches * B) % windows.count
    return permute(order, windows.count, hash_seed(config.seed, EVAL_STREAM)).reshape(batches, B)
