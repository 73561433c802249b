"""Muon's update of one matrix whose gradient is as small as asked, in any dtype."""

import torch
from support.updates import update

from training.configuration.keys import TrainConfig
from training.optimization.muon import Muon
from training.strategies.strategy import Shard


def gradient_of_size(rms: float) -> torch.Tensor:
    """512 x 1024, with singular values from 1 to 0.001 of the largest."""
    seeded = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 512, generator=seeded))[0] for n in (512, 1024))
    gradient = (left * torch.logspace(0, -3, 512)) @ right.mT
    return gradient * rms / gradient.square().mean().sqrt()


def direction(gradient: torch.Tensor, dtype: str) -> torch.Tensor:
    """Of a first update, without decay."""
    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    config = TrainConfig(optimizer="muon", dtype=dtype, learning_rate=1.0, weight_decay=0.0)
    norm = torch.nn.Parameter(torch.ones(4, device=gradient.device))
    optimizer = Muon([Shard("blocks.0.attn.out.weight", weight, weight), Shard("norm", norm, norm)], config)
    weight.grad, norm.grad = gradient.clone(), torch.zeros_like(norm)
    update(optimizer, config.learning_rate)
    return -weight.detach()


def assert_direction_of_float32(gradient: torch.Tensor, dtype: str) -> None:
    ours, theirs = direction(gradient, dtype).flatten(), direction(gradient, "float32").flatten()
    assert torch.cosine_similarity(ours, theirs, 0) > 0.99
    assert 0.98 < ours.norm() / theirs.norm() < 1.02
