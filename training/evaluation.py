"""Evaluates on fixed token windows: the same for every strategy and world size, so losses can be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from common.errors import RunError
from training.batches.windows import Split, Windows, inputs_and_targets, permute
from training.configuration.batch import EVAL_BATCH, divisors
from training.configuration.keys import TrainConfig
from training.configuration.seeds import EVALUATION, stream_seed
from training.process.world import World, sum_over_ranks


def evaluate(
    model,
    windows: dict[str, Split],
    config: TrainConfig,
    world: World,
    check: Callable[[], None] = lambda: None,
) -> dict:
    """{split: mean loss} over all targets in eval_iters batches of eval_batch_size sequences per split. All
    ranks. `check` is called before each forward pass and may raise. Raises RunError if there is no target.

    Each source of a mixture gets its weight's share of the batches, at least one. The split's loss is the
    weighted mean of its sources' losses, and "sources" in the result is {source: {split: loss}}.

    Rank (i mod world size) makes forward pass i. Every rank makes the same number of forward passes, because
    with FSDP each pass communicates; surplus passes are not counted.
    """
    losses: dict[str, Any] = {}
    sources: dict[str, dict[str, float]] = {}
    model.eval()
    try:
        for split, mixture in windows.items():
            losses[split] = 0.0
            for name, (weight, source) in mixture.by_source.items():
                loss = _mean_loss(model, source, eval_batches(source, config, weight), world, check)
                losses[split] += float(weight) * loss
                sources.setdefault(name, {})[split] = loss
    finally:
        model.train()  # also where check() has raised
    return losses if len(sources) == 1 else {**losses, "sources": sources}


@torch.no_grad()
def _mean_loss(model, windows: Windows, batches: np.ndarray, world: World, check) -> float:
    total = torch.zeros(2, dtype=torch.float64, device=world.device)  # losses and targets, a position
    for first in range(0, len(batches), world.size):
        check()
        mine = first + world.rank
        tokens = torch.from_numpy(windows.read(batches[min(mine, len(batches) - 1)])).to(world.device)
        x, y = inputs_and_targets(tokens)
        share = (y >= 0).double().mean() * (mine < len(batches))
        # a mean over no targets is nan in torch
        total += torch.stack([torch.where(share > 0, model(x, y) * share, 0.0), share])
    loss, targets = sum_over_ranks(total, world).tolist()  # sync point
    if not targets:
        raise RunError(
            "an evaluation found no token to predict: each of its windows is a document of one token; raise "
            "eval_iters, or set packing='stream'"
        )
    return loss / targets


def eval_batches(windows: Windows, config: TrainConfig, weight: Fraction | int = 1) -> np.ndarray:
    """(passes, sequences) window indices: at most eval_iters x weight batches, no window twice. A split with
    fewer windows than one batch repeats them to fill it. Which windows these are does not depend on the
    micro-batch: a batch is divided into equal passes that are not larger."""
    B = config.eval_batch_size or EVAL_BATCH
    sequences = max(d for d in divisors(B) if d <= config.micro_batch)
    batches = max(1, min(round(config.eval_iters * weight), windows.count // B))
    order = np.arange(batches * B) % windows.count
    return permute(order, windows.count, stream_seed(config.seed, EVALUATION)).reshape(-1, sequences)


def measure(windows: dict[str, Split], config: TrainConfig, data: dict[str, Any]) -> str | None:
    """Identifies what a validation loss is the mean of: the tokens (`data` is their fingerprint), which
    windows of them, and how these are cut and masked. Losses of another measure cannot be compared. None if
    the run does not evaluate."""
    if "val" not in windows:
        return None
    measured: list[Any] = [config.block_size, config.packing, config.doc_masking]
    sources = windows["val"].by_source.values()
    for (weight, source), facts in zip(sources, data.get("sources", [data]), strict=True):
        chosen = np.sort(eval_batches(source, config, weight), axis=None)  # however they are divided
        files = [file["sha256"] or file["probe"] for _, file in sorted(facts["splits"]["val"].items())]
        documents = facts["eot_id"], facts.get("packings", {}).get(f"val-{config.block_size}")
        measured.append([str(weight), hashlib.sha256(chosen.tobytes()).hexdigest(), files, documents])
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()
