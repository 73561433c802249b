"""The kernels of ops/triton_kernels/norm.py in plain PyTorch, so that a CPU goes the way of a GPU: the norm's
backward hands on the amax of its gradient (ops/norm.py, Delta)."""

import sys
import types

import torch

import model
from ops import norm, swiglu
from ops.linear import Linear
from ops.low_precision import LowPrecisionLinear

handed: list[torch.Tensor] = []


def forward(x, delta, weight, bias, eps, centered):
    total = x + delta
    wide = total.float()
    mean = wide.mean(-1) if centered else torch.zeros(len(wide))
    wide = wide - mean[:, None]
    scale = torch.rsqrt(wide.square().mean(-1) + eps)
    y = wide * scale[:, None] * weight.float()
    y = (y if bias is None else y + bias.float()).to(x.dtype)
    return total, y, y.float().abs().amax(-1), torch.stack([mean, scale])


def backward(total, dnormed, dtotal, weight, rows, centered, bias, amax):
    mean, scale = rows[:, :, None]
    n, wide = (total.float() - mean * centered) * scale, dnormed.float() * weight.float()
    d = wide - n * (wide * n).mean(-1, keepdim=True)
    if centered:
        d = d - wide.mean(-1, keepdim=True)
    dx = (dtotal.float() + scale * d).to(total.dtype)
    dweights = [dnormed.float() * n] + [dnormed.float()] * bias
    largest = dx.float().abs().amax() if amax else torch.empty(())
    if amax:
        handed.append(largest)
    return dx, torch.stack(dweights).sum(1), largest


def use(monkeypatch) -> None:
    """Blocks take the way of a GPU from here on, and `handed` has each amax that is handed on."""
    handed.clear()
    kernels = types.ModuleType("ops.triton_kernels.norm")
    kernels.__dict__.update(triton_add_norm=forward, triton_add_norm_backward=backward)
    package = types.ModuleType("ops.triton_kernels")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(model, "add_norm", add_norm)
    monkeypatch.setattr(Linear, "delta", delta)
    monkeypatch.setattr(model, "swiglu_feed_forward", feed_forward)


def add_norm(x, delta, settings):
    value, gradient_amax = delta
    rows = x.flatten(0, -2), value.flatten(0, -2)
    total, normed, amax, _ = norm._add_norm(*rows, *settings, gradient_amax)
    return total.view_as(x), normed.view_as(x), amax


def delta(self, x, amax, gradient_amax):
    if gradient_amax:
        return LowPrecisionLinear.apply(x, amax, *self.low_precision_arguments, True)
    return self(x, amax), None


def feed_forward(x, amax, up, down, gradient_amax):
    arguments = x, amax, *up.low_precision_arguments, *down.low_precision_arguments
    result = swiglu.LowPrecisionSwiGLU.apply(*arguments, gradient_amax)
    return result if gradient_amax else (result, None)
