"""AdamW over this rank's shards, fused into one pass. Loshchilov and Hutter 2019."""

from __future__ import annotations

import torch

from training.config import TrainConfig
from training.parallel import Shard


def build_optimizer(shards: list[Shard], config: TrainConfig) -> torch.optim.AdamW:
    """Weight decay on matrices (embeddings too) and on nothing else. State is allocated at once, so a
    checkpoint can be loaded into it and an out-of-memory shows before the first step."""
    groups = [
        {"params": [s.local for s in shards if s.is_matrix], "weight_decay": config.weight_decay},
        {"params": [s.local for s in shards if not s.is_matrix], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.learning_rate, betas=betas, fused=True
    )
    for shard in shards:
        optimizer.state[shard.local] = {
            "step": torch.zeros((), dtype=torch.float32, device=shard.local.device),
            "exp_avg": torch.zeros_like(shard.local),
            "exp_avg_sq": torch.zeros_like(shard.local),
        }
    return optimizer


def describe_optimizer(shards: list[Shard], config: TrainConfig) -> dict:
    """The record's startup_info.optimizer: tensors and parameters of the whole model, per group."""
    groups = []
    for is_matrix, decay in ((True, config.weight_decay), (False, 0.0)):
        members = [s.parameter for s in shards if s.is_matrix == is_matrix]
        groups.append(
            {"weight_decay": decay, "tensors": len(members), "params": sum(p.numel() for p in members)}
        )
    return {"type": "AdamW (fused)", "param_groups": groups}
