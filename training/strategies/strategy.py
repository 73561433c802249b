"""What strategies share: the part of a parameter that a rank updates, and the norm of its gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn.utils import get_total_norm


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


def norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """Norm of this rank's gradients, a 0-d fp32 tensor."""
    if grads[0].is_cuda:
        return get_total_norm(grads).float()
    # torch's CPU kernel adds fp32 squares one by one: 1e-4 off at 5 M elements, and clipping would inherit it
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    return torch.linalg.vector_norm(torch.stack(norms)).float()
