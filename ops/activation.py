"""What one operation hands to the next: a tensor, and what is known of it. Norms, Linears and attention look
inside; model.py does not.

amax is the largest magnitude of a tensor, which an fp8 matmul needs before it can cast (ops/float8.py).
Whoever writes a tensor finds it for nothing. In the forward it comes with the tensor. In the backward, only
gradients can be handed on: `gradient_amax` is a scalar that nobody reads, and its gradient is the amax of
value's gradient. An operation that takes an Activation computes that gradient and adds the bias, or calls
plain().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn as nn

# What a layer adds to the residual stream: value and gradient_amax of an Activation. A plain tuple, because
# torch.compile of 2.11 cannot return a NamedTuple.
Delta = tuple[torch.Tensor, torch.Tensor | None]


class Activation(NamedTuple):
    value: torch.Tensor
    amax: torch.Tensor | None = None  # of any shape, its maximum is that of all of value; None: not known
    gradient_amax: torch.Tensor | None = None  # () fp32; None: nobody needs it
    source: tuple | None = None  # the arguments of ops/norm.py's norm_again, which computes value again
    opaque: bool = False  # a kernel wrote it into which torch.compile does not see
    bias: torch.Tensor | None = None  # (C,), still to be added to value; amax and source do not know it

    @staticmethod
    def of(x: torch.Tensor | Activation) -> Activation:
        return x if isinstance(x, Activation) else Activation(x)

    def with_bias(self) -> torch.Tensor:
        return self.value if self.bias is None else self.value + self.bias

    def plain(self) -> torch.Tensor:
        """with_bias(), for an operation that does not find its gradient's amax: a pass of its own does."""
        x = self.with_bias()
        return x if self.gradient_amax is None else _FindAmax.apply(x, self.gradient_amax)


class _FindAmax(torch.autograd.Function):
    """x -> x. The gradient of the scalar becomes the amax of x's gradient."""

    @staticmethod
    def forward(ctx, x, gradient_amax):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, dx.abs().amax(-1).amax().float()  # by rows first: in the kernel that makes dx, if compiled


def call(part: Callable[..., Any], *inputs: Any) -> Any:
    """How a layer runs a part of itself, where nothing else is set (ops/recompute.py)."""
    return part(*inputs)


def drop(delta: Delta, dropout: nn.Dropout) -> Delta:
    """Dropout of what a layer adds."""
    return (dropout(Activation(delta[0], gradient_amax=delta[1]).plain()), None) if dropout.p else delta


def no_delta(x: torch.Tensor) -> Delta:
    """For the first block: zeros like x, which need a gradient if x does. So torch.compile has one form of a
    block to compile, and not another one for the first."""
    return _Zeros.apply(x), None


class _Zeros(torch.autograd.Function):
    """x -> zeros of its shape, through which no gradient goes back."""

    @staticmethod
    def forward(ctx, x):
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, dzeros):
        return None
