"""One iteration: every micro-step's forward and backward, one reduction, clip, update. Returns device
tensors; nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ops.documents import Documents
from training.configuration.keys import TrainConfig
from training.optimization.precision import LossScale
from training.optimization.update_guard import Health


class StepResult(NamedTuple):
    loss: torch.Tensor  # mean over this rank's tokens of the iteration
    grad_norm: torch.Tensor  # global, before clipping, unscaled; equal on all ranks
    grad_sum: torch.Tensor | None  # this rank's part of the gradient's sum, when asked for
    overflow: torch.Tensor  # 1.0 if the gradient was not finite
    verdict: (
        torch.Tensor
    )  # 0, or why the update was skipped: bits of training/optimization/update_guard.py; equal on all ranks
    attended: torch.Tensor  # length of the document that a token is in, mean over this rank's tokens


def make_step(
    strategy,
    optimizer,
    loss_scale: LossScale,
    config: TrainConfig,
    documents: Documents | None = None,
    health: Health | None = None,
) -> Callable[..., StepResult]:
    """step(x, y, learning_rate, with_gradient_sum=False); x, y (A, B, T) hold A micro-steps of token ids, and
    learning_rate is a number, or a tensor on the device where the step is captured (training/cuda_graphs/graphed_step.py).
    `health` is for whoever keeps its state beyond the step, as checkpoints do."""
    rate = torch.zeros((), device=loss_scale.scale.device)  # read by the update when it runs, not before
    health = health or Health(config, rate.device)
    for group in optimizer.param_groups:
        group["lr"] = rate
    whole_window = torch.full_like(rate, config.block_size)

    def step(x, y, learning_rate: float | torch.Tensor, with_gradient_sum: bool = False) -> StepResult:
        micro_steps = len(x)
        losses = []
        for i in range(micro_steps):
            strategy.micro_step(last=i == micro_steps - 1)
            loss = strategy.forward(x[i], y[i])
            (loss * (loss_scale.scale / micro_steps)).backward()
            losses.append(loss.detach())
        loss = torch.stack(losses).mean()
        strategy.reduce_gradients(loss)

        mean_loss, norm = strategy.loss_and_norm()
        grad_norm = norm / loss_scale.scale
        verdict, overflow = health.judge(mean_loss, grad_norm)
        grad_sum = _gradient_sum(strategy.shards) / loss_scale.scale if with_gradient_sum else None

        # The fused kernel divides gradients by grad_scale and leaves everything alone if found_inf is 1:
        # clipping and unscaling cost no pass of their own, and a bad update never reaches the weights.
        optimizer.grad_scale = loss_scale.scale * _clip_divisor(grad_norm, config.grad_clip)
        optimizer.found_inf = verdict.clamp(max=1)
        rate.fill_(learning_rate)
        optimizer.step()
        strategy.publish()
        strategy.clear_gradients()
        loss_scale.update(overflow)
        attended = documents.length_per_token(x) if documents else whole_window
        return StepResult(loss, grad_norm, grad_sum, overflow, verdict, attended)

    return step


def _clip_divisor(grad_norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What to divide gradients by so that their norm is at most max_norm. Pascanu et al. 2013, alg. 1."""
    if max_norm == 0:
        return torch.ones_like(grad_norm)
    return (grad_norm / max_norm).clamp(min=1.0)


def _gradient_sum(shards) -> torch.Tensor:
    return torch.stack([s.local.grad.sum(dtype=torch.float32) / s.replicas for s in shards]).sum()
