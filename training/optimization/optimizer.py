"""AdamW over this rank's shards, fused into one pass. Loshchilov and Hutter 2019.

With weights and moments in fp32 it is torch's own. adam_dtype or param_dtype='bfloat16' store one of them or
both in 2 bytes; the arithmetic stays fp32.
"""

from __future__ import annotations

import torch
import torch.nn as nn

from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.strategies.strategy import Shard

PART = 2**22  # elements that MixedAdamW updates at a time: its fp32 copies, 64 MiB, stay near a GPU's cache


class MixedAdamW(torch.optim.AdamW):
    """AdamW whose weights and moments may be bf16, each with a dtype of its own.

    torch's fused kernel wants one dtype for all, so it is given fp32 copies of a part of a tensor at a time,
    which are then rounded back to nearest. Trap: rounding hides a change of less than 2^-8 of a moment, and a
    moment decays by 1 - beta an iteration; training/configuration/rules.py refuses betas above 0.99.
    Stochastic rounding would allow them, for a random number an element. No value is looked at, so nothing
    waits for the device, and found_inf = 1 leaves every bit as it is: what the kernel does not change rounds
    back to itself.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # without a closure
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            steps = [self.state[weight]["step"] for weight in weights]
            torch._foreach_add_(steps, 1)
            for weight, step in zip(weights, steps, strict=True):
                state = self.state[weight]
                whole = (weight, weight.grad, state["exp_avg"], state["exp_avg_sq"])
                parts = (tensor.view(-1).split(PART) for tensor in whole)
                for part, gradient, mean, square in zip(*parts, strict=True):
                    _update(part, gradient, mean, square, step, group, scale, overflow)
            if overflow is not None:
                torch._foreach_sub_(steps, [overflow] * len(steps))


def _update(weight, gradient, mean, square, step, group: dict, grad_scale, found_inf) -> None:
    """AdamW's update of weight, mean and square in place; all four (n,), each in a dtype of its own."""
    if not len(weight):
        return  # of a sharded matrix this rank may have no row
    wide_weight, wide_mean, wide_square = (tensor.float() for tensor in (weight, mean, square))
    torch._fused_adamw_(
        [wide_weight],
        [gradient.float()],
        [wide_mean],
        [wide_square],
        [],
        [step],
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )
    weight.copy_(wide_weight)  # if it is fp32, the two are one tensor, and nothing is copied
    mean.copy_(wide_mean)
    square.copy_(wide_square)


def build_optimizer(shards: list[Shard], config: TrainConfig) -> torch.optim.AdamW:
    """Weight decay on matrices (embeddings too) and on nothing else. State is allocated at once, so a
    checkpoint can be loaded into it and an out-of-memory shows before the first step."""
    moments = DTYPES[config.adam_dtype]
    plain = moments == DTYPES[config.param_dtype] == torch.float32
    groups = [
        {"params": [s.local for s in shards if s.is_matrix], "weight_decay": config.weight_decay},
        {"params": [s.local for s in shards if not s.is_matrix], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    optimizer = (torch.optim.AdamW if plain else MixedAdamW)(
        [group for group in groups if group["params"]], lr=config.learning_rate, betas=betas, fused=True
    )
    for shard in shards:
        optimizer.state[shard.local] = {
            "step": torch.zeros((), dtype=torch.float32, device=shard.local.device),
            "exp_avg": torch.zeros_like(shard.local, dtype=moments),
            "exp_avg_sq": torch.zeros_like(shard.local, dtype=moments),
        }
    return optimizer


def describe_optimizer(model: nn.Module, config: TrainConfig) -> dict:
    """The record's startup_info.optimizer: tensors and parameters of the whole model, per group."""
    groups = []
    for is_matrix, decay in ((True, config.weight_decay), (False, 0.0)):
        members = [p for p in model.parameters() if (p.ndim >= 2) == is_matrix]
        groups.append(
            {"weight_decay": decay, "tensors": len(members), "params": sum(p.numel() for p in members)}
        )
    return {"type": "AdamW (fused)", "moments": config.adam_dtype, "param_groups": groups}
