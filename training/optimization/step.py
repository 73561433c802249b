"""Computes one iteration: forward and backward of every micro-step, one reduction, clip, update. Returns
device tensors; nothing here waits for the device."""

from __future__ import annotations

import functools
import time
from typing import NamedTuple, Protocol

import torch

from ops.cross_entropy import GradientScale
from ops.documents import Documents
from ops.ranges import BACKWARD, FORWARD, OPTIMIZER, named_range
from ops.recipe import Recipe
from training.configuration.keys import TrainConfig
from training.optimization.optimizer import Optimizer
from training.optimization.precision import LossScale
from training.optimization.second_look import SecondLook
from training.optimization.update_guard import UpdateGuard
from training.process.work_timer import WorkTimer
from training.process.world import mean_over_ranks
from training.strategies.strategy import Shard, Strategy


class StepResult(NamedTuple):
    loss: torch.Tensor  # its mean over the ranks is the mean over all targets of the iteration
    grad_norm: torch.Tensor  # global, before clipping, unscaled; equal on all ranks
    grad_sum: torch.Tensor | None  # this rank's share of the gradient's sum, if asked for
    overflow: torch.Tensor  # 1.0 if the gradient was not finite
    verdict: torch.Tensor  # 0, or why the update was skipped: bits of update_guard.py; equal on all ranks
    attended: torch.Tensor  # length of the document that a token is in, mean over this rank's tokens
    optimizer_ms: torch.Tensor  # that the update took, of weights and working copies, on this rank
    targets: torch.Tensor  # share of all ranks' positions that have a target: not all, if there is padding


class Step(Protocol):
    """One iteration, eager or captured. Both return device tensors, and neither waits for the device."""

    def __call__(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        learning_rate: float | torch.Tensor,
        with_gradient_sum: bool = False,
        second_look: bool = False,
    ) -> StepResult:
        """x, y (A, B, T) are the token ids of A micro-steps. learning_rate is a number, or a device tensor if
        the step is being captured (training/cuda_graphs/graphed_step.py). second_look: whether the first
        micro-step runs twice (training/optimization/second_look.py)."""

    def close(self) -> None:
        """After the last iteration, before the process group ends."""


class EagerStep:
    """Forward and backward of every micro-step, one reduction, clip, update."""

    def __init__(
        self,
        strategy: Strategy,
        optimizer: Optimizer,
        loss_scale: LossScale,
        config: TrainConfig,
        update_guard: UpdateGuard,
        recipe: Recipe,
        documents: Documents | None = None,
        timer: WorkTimer | None = None,
    ):
        self.strategy, self.optimizer, self.loss_scale = strategy, optimizer, loss_scale
        self.update_guard, self.documents, self.timer = update_guard, documents, timer
        self.recipe = recipe
        self.second_look = SecondLook(strategy, config)
        self.grad_clip = config.grad_clip
        self.is_first = True  # micro-step of this process: a model's faults are looked for
        # a tensor, which the update reads each time it runs: a capture would always use the same number
        self.learning_rate = torch.zeros((), device=loss_scale.scale.device)
        self.whole_window = torch.full_like(self.learning_rate, config.block_size)
        self.pads, self.every_position = config.packing == "truncate", torch.ones_like(self.learning_rate)

    def __call__(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        learning_rate: float | torch.Tensor,
        with_gradient_sum: bool = False,
        second_look: bool = False,
    ) -> StepResult:
        # (A,): of each micro-step, the share of the positions that have a target
        shares = (y >= 0).float().mean((1, 2)) if self.pads else None
        loss = self._forward_and_backward(x, y, shares, second_look)
        self.strategy.reduce_gradients(loss)

        scale, targets = self.loss_scale.scale, self.every_position
        mean_loss, norm = self.strategy.loss_and_norm()
        if shares is not None:
            # so far, all is divided by the number of positions, which needs no word of other ranks
            targets = mean_over_ranks(shares.mean(), self.strategy.world)
            divisor = torch.where(targets > 0, targets, 1.0)
            loss, mean_loss, scale = loss / divisor, mean_loss / divisor, scale * divisor
        grad_norm = norm / scale
        differing = self.second_look.ranks_that_differ() if second_look else None
        verdict, overflow = self.update_guard.judge(mean_loss, grad_norm, differing)
        grad_sum = _gradient_sum(self.strategy.trained) / scale if with_gradient_sum else None

        # The update divides gradients, and changes nothing if the verdict is not 0. So clipping and unscaling
        # cost no pass of their own, and a bad update never reaches the weights.
        divisor = scale * _clip_divisor(grad_norm, self.grad_clip)
        self.learning_rate.fill_(learning_rate)
        began = now(scale.device)
        with named_range(OPTIMIZER):
            self.optimizer.step(self.learning_rate, divisor, verdict.clamp(max=1))
        optimizer_ms = (now(scale.device) - began).float() / 1e6
        self.strategy.publish(copied=self.optimizer.writes_copies)
        self.strategy.clear_gradients()
        self.loss_scale.update(overflow)
        attended = self.documents.length_per_token(x) if self.documents else self.whole_window
        return StepResult(loss, grad_norm, grad_sum, overflow, verdict, attended, optimizer_ms, targets)

    def _forward_and_backward(
        self, x: torch.Tensor, y: torch.Tensor, shares: torch.Tensor | None, second_look: bool
    ) -> torch.Tensor:
        """The sum of this rank's losses, divided by its number of positions. Gradients are summed where the
        strategy keeps them, divided likewise. shares: None if every position has a target."""
        micro_steps = len(x)
        gradient_scale = self.loss_scale.scale / micro_steps
        losses = []
        self.recipe.before_iteration()
        for i in range(micro_steps):
            last, repeats = i == micro_steps - 1, second_look and i == 0
            scale = gradient_scale if shares is None else gradient_scale * shares[i]
            run = functools.partial(self._micro_step, x[i], y[i], scale, last, repeats)
            loss = self.second_look(run) if repeats else run()
            losses.append(self.recipe.after_micro_step(loss, last))
        means = torch.stack(losses)
        if shares is not None:
            means = torch.where(shares > 0, means * shares, 0.0)  # a mean over no targets is nan in torch
        return means.mean()

    def _micro_step(
        self, x: torch.Tensor, y: torch.Tensor, gradient_scale: torch.Tensor, last: bool, repeats: bool
    ) -> torch.Tensor:
        """The loss. Changes nothing but the sums of gradients, so that it may be repeated."""
        self.strategy.micro_step(last, repeats)
        self.recipe.before_micro_step()
        checks, self.is_first = self.is_first, False
        with named_range(FORWARD):
            loss = self.strategy.forward(x, y, GradientScale(gradient_scale, checks))
        if self.timer:
            self.timer.end_forward()
        with named_range(BACKWARD):
            (loss * gradient_scale).backward()
        return loss.detach()

    def close(self) -> None:
        pass


def now(device: torch.device) -> torch.Tensor:
    """Nanoseconds, int64 (), of a clock that counts on the device."""
    if device.type == "cuda":
        from ops.triton_kernels.timestamp import timestamp

        return timestamp(device)
    return torch.tensor(time.perf_counter_ns())


def _clip_divisor(grad_norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The divisor that makes the gradients' norm at most max_norm. Pascanu et al. 2013, alg. 1."""
    if max_norm == 0:
        return torch.ones_like(grad_norm)
    return (grad_norm / max_norm).clamp(min=1.0)


def _gradient_sum(shards: list[Shard]) -> torch.Tensor:
    return torch.stack([s.grad.sum(dtype=torch.float32) / s.replicas for s in shards]).sum()
