"""GELU in its tanh form (Hendrycks and Gimpel 2016, sec. 2), in few instructions.

    0.5 x (1 + tanh(u)) = x sigmoid(2u),  u = sqrt(2 / pi) (x + 0.044715 x^3)

torch.compile makes some 33 instructions a number of the left side and 14 of the right one. A GPU at its power
limit has about 15 in the time that the number's 4 bytes take, so the left side is not bound by memory.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ops.ranges import ranged

CUBIC = 0.044715
# e^-2u = 2^(x (LINEAR + CUBED x^2))
LINEAR = -2 * math.sqrt(2 / math.pi) / math.log(2)
CUBED = CUBIC * LINEAR


@ranged("activation")
def gelu(x: torch.Tensor) -> torch.Tensor:
    """In x's dtype, computed in fp32. Without torch.compile torch's own, which is one kernel."""
    return GELU.apply(x) if torch.compiler.is_compiling() else F.gelu(x, approximate="tanh")


class GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        wide = _wide(x)
        return (wide / (1 + torch.exp2(wide * (LINEAR + CUBED * (wide * wide))))).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        wide = _wide(x)
        squared = wide * wide
        s = 1 / (1 + torch.exp2(wide * (LINEAR + CUBED * squared)))  # sigmoid(2u)
        y = wide * s
        # y' = s + x s (1 - s) 2u', and 2u' = -ln 2 (LINEAR + 3 CUBED x^2)
        slope = -math.log(2) * LINEAR - 3 * math.log(2) * CUBED * squared
        return (dy * (s + (y - y * s) * slope)).to(x.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.itemsize < 4 else x
