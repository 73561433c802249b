"""Defines what a strategy is: it spreads weights, gradients and optimizer state over the processes, behind a
few methods. The step, the optimizer, checkpoints and checks use this protocol and know no single strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist
import torch.nn as nn

from model import Transformer
from ops.cross_entropy import GradientScale
from ops.linear import Linear
from training.process.world import World


@dataclass(frozen=True)
class Shard:
    """The part of a parameter that this rank's optimizer updates, `local`, is stored in param_dtype. The
    model computes with `parameter`, which may be a copy in the compute dtype."""

    name: str
    parameter: nn.Parameter
    local: nn.Parameter
    replicas: int = 1  # number of ranks that hold this same part
    # this part of `parameter`, shaped like `local`, if the strategy keeps it in another tensor than `local`
    working_copy: torch.Tensor | None = None
    start: int = 0  # index of the first element of `local` in the whole parameter, row by row

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter, own: torch.Tensor, *places, **more) -> Shard:
        """own: what `local` holds. It is frozen if the parameter is."""
        return cls(name, parameter, nn.Parameter(own, parameter.requires_grad), *places, **more)

    @property
    def is_matrix(self) -> bool:
        return self.parameter.ndim >= 2

    @property
    def trains(self) -> bool:
        """Whether it has a gradient and an update: nobody has frozen it."""
        return self.parameter.requires_grad

    @property
    def grad(self) -> torch.Tensor:
        """The gradient of `local`, once reduce_gradients() has put it there."""
        assert self.local.grad is not None, self.name
        return self.local.grad


class Strategy(Protocol):
    """One process, DDP, ZeRO-1 or FSDP. All ranks call the same methods in the same order."""

    module: Transformer
    world: World
    shards: list[Shard]  # for each parameter, in the model's order, what this rank's optimizer updates
    trained: list[Shard]  # those of them that are not frozen
    parts: int  # of a sharded tensor: ranks r and r + parts hold the same one. 1: every rank holds all

    @property
    def row_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the rows of matrices; None: every rank has whole ones."""

    @property
    def forward(self) -> Callable[[torch.Tensor, torch.Tensor, GradientScale], torch.Tensor]:
        """forward(x, y, gradient_scale): the loss of one micro-batch, on the training graph.
        gradient_scale: what the caller multiplies the loss by (ops/cross_entropy.py)."""

    def micro_step(self, last: bool, repeats: bool = False) -> None:
        """Before a micro-step's forward. Gradients are communicated during the last one's backward. repeats:
        this one runs twice, and gradient_sums() are looked at after each time."""

    def gradient_sums(self) -> dict[str, torch.Tensor]:
        """{parameter: what this rank alone has summed so far}, after a backward that `repeats`. With FSDP and
        one micro-step there are no such sums: this rank's shards of the mean over the ranks."""

    def reduce_gradients(self, loss: torch.Tensor) -> None:
        """After the last backward, with this rank's loss of the iteration. Every shard.local.grad becomes the
        mean over the ranks."""

    def loss_and_norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean over the ranks of reduce_gradients()'s loss, which may be rounded to reduce_dtype, and the
        global gradient norm: device tensors, equal on all ranks."""

    def publish(self, copied: bool = False) -> None:
        """After the update, or after loading: gives every rank the new working weights. `copied` says that
        the update has already written the working copies of this rank's shards."""

    def settle(self) -> None:
        """Before an iteration is recorded as a CUDA graph or replayed, and as the last part of the recorded
        one: nothing is on its way and no weight is gathered, so each replay begins as the capture did. All
        ranks."""

    def clear_gradients(self) -> None: ...

    def working_copies(self) -> dict[str, torch.Tensor]:
        """{name: weight that this rank computes with}, for weights that are whole and are not the optimizer's
        own tensors."""

    def abandon_iteration(self) -> None:
        """Drops the gradients, and communication in progress, of an iteration that was broken off."""

    def can_go_on(self) -> bool:
        """Whether another iteration can follow, although a capture may have been broken off in this one."""

    def has_gradients(self) -> bool:
        """Whether any gradient is not zero. Sync point."""


def offer_sums(model: nn.Module, sums: dict[torch.Tensor, torch.Tensor]) -> None:
    """Whoever adds its weight's gradient to a sum itself, in the matmul that computes it, declares
    weight_grad and gets the sum. The gradients of all others, and of other uses of such a weight, are
    autograd's."""
    for module in model.modules():
        if hasattr(module, "weight_grad"):
            owner = cast("Linear", module)
            owner.weight_grad = sums.get(owner.weight)


def norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """Norm of this rank's gradients, a 0-d fp32 tensor."""
    return torch.linalg.vector_norm(norms(grads)).float()


def norms(grads: list[torch.Tensor], foreach: bool = True) -> torch.Tensor:
    """The norm of each tensor, together one tensor. foreach: in one launch on a GPU, for many tensors. A
    launch for each of a few large ones reads faster: 1.7 ms instead of 2.2 for 1.8e9 elements on an H200."""
    if grads[0].is_cuda:  # squares are added in fp32, at most some hundred one after another
        if foreach:
            return torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))
        return torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads])
    # torch's CPU kernel adds fp32 squares one by one: an error of 1e-4 at 5 M elements, also for clipping
    return torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads])
