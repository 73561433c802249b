"""What a strategy is: how weights, gradients and optimizer state are spread over the processes, behind a few
verbs. The step, the optimizer, checkpoints and checks know this protocol and no strategy by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn as nn
from torch.nn.utils import get_total_norm

from model import Transformer


@dataclass(frozen=True)
class Shard:
    """The part of a parameter that this rank's optimizer updates, stored in param_dtype. The parameter
    itself, which the model computes with, may be a copy of it in the compute dtype."""

    name: str
    parameter: nn.Parameter
    local: nn.Parameter
    replicas: int = 1  # ranks that hold this same part

    @property
    def is_matrix(self) -> bool:
        return self.parameter.ndim >= 2

    @property
    def grad(self) -> torch.Tensor:
        """The gradient of `local`, once reduce_gradients() has put it there."""
        assert self.local.grad is not None, self.name
        return self.local.grad


class Strategy(Protocol):
    """One process, DDP, ZeRO-1 or FSDP. All ranks call the same verbs in the same order."""

    module: Transformer
    shards: list[Shard]  # for each parameter, the part that this rank's optimizer updates
    parts: int  # of a sharded tensor; rank r holds the same part as rank r + parts. 1: every rank holds all

    @property
    def forward(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """forward(x, y): the loss of one micro-batch, on the training graph."""

    def micro_step(self, last: bool) -> None:
        """Before a micro-step's forward. Gradients travel during the last one's backward."""

    def reduce_gradients(self, loss: torch.Tensor) -> None:
        """After the last backward, with the iteration's loss on this rank: every shard.local.grad becomes the
        mean over the ranks."""

    def loss_and_norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean of that loss over the ranks, which may be rounded to reduce_dtype, and the global gradient
        norm: device tensors, equal on all ranks."""

    def publish(self) -> None:
        """After the update, or after loading: every rank's working weights are the new ones."""

    def clear_gradients(self) -> None: ...

    def as_global(self, shard: Shard, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor shaped like shard.local as the whole that it is part of, for checkpoints."""

    def working_copies(self) -> dict[str, torch.Tensor]:
        """{name: weight that this rank computes with} where it is whole and is no tensor of the
        optimizer's."""

    def abandon_iteration(self) -> None:
        """Drops gradients, and communication under way, of an iteration that was broken off."""

    def has_gradients(self) -> bool:
        """Whether any gradient is not zero. Sync point."""


def norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """Norm of this rank's gradients, a 0-d fp32 tensor."""
    if grads[0].is_cuda:
        return get_total_norm(grads).float()
    # torch's CPU kernel adds fp32 squares one by one: 1e-4 off at 5 M elements, and clipping would inherit it
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    return torch.linalg.vector_norm(torch.stack(norms)).float()
