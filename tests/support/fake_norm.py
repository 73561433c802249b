"""The kernels of ops/triton_kernels/norm.py in plain PyTorch, so that a CPU goes the way of a GPU: the norm's
backward hands on the amax of its gradient (ops/activation.py)."""

import sys
import types

import torch

from model import FeedForward
from ops import norm
from ops.activation import Activation
from ops.feed_forward import Float8SwiGLU, feed_forward
from ops.float8 import amax_of
from ops.float8_linear import Float8Linear, Float8Matmul
from ops.swiglu import swiglu

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


def use(monkeypatch, *modules, layers_tell=True) -> None:
    """Blocks inside of the modules take the way of a GPU from here on, and `handed` has each amax that a norm
    hands on."""
    handed.clear()
    kernels = types.ModuleType("ops.triton_kernels.norm")
    kernels.__dict__.update(triton_add_norm=forward, triton_add_norm_backward=backward)
    package = types.ModuleType("ops.triton_kernels")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(norm, "add_norm", add_norm)
    let_layers_ask(monkeypatch, *modules, layers_tell=layers_tell)


def let_layers_ask(monkeypatch, *modules, layers_tell: bool) -> None:
    """Whether layers in fp8 inside of the modules ask for the amax of their gradient, wherever they are: they
    do on a GPU."""

    def project(self, x, tells_amax=False):
        assert self.bias is None
        asks = tells_amax and layers_tell
        amax = amax_of(x.value) if x.amax is None and x.opaque else x.amax
        found = Float8Matmul.apply(x.value, amax, self.weight, self, asks)
        y, gradient_amax = found if asks else (found, None)
        return Activation(y, gradient_amax=gradient_amax)

    def compute(x, up, activation, down):
        if activation is not swiglu:
            return feed_forward(x, up, activation, down)
        layers = up.weight, down.weight, up, down
        found = Float8SwiGLU.apply(x.value, x.amax, *layers, layers_tell)
        return found if layers_tell else (found, None)

    monkeypatch.setattr(Float8Linear, "project", project)
    for layer in (inside for module in modules for inside in module.modules()):
        if isinstance(layer, FeedForward):
            monkeypatch.setattr(layer, "compute", compute)


def add_norm(x, delta, settings):
    value, gradient_amax = delta
    rows = x.flatten(0, -2), value.flatten(0, -2)
    total, normed, amax = norm.AddNorm.apply(*rows, gradient_amax, *settings)
    total = total.view_as(x)
    return total, Activation(normed.view_as(x), amax, source=(total, *settings))
