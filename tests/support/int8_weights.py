"""A recipe of one's own, CONTRIBUTING.md's example: training for weights that will be served in int8.

    PYTHONPATH=tests python train.py ... --dtype=bfloat16 --low_precision=support.int8_weights

A matmul sees each row of a weight rounded to 255 steps; the gradient passes the rounding by as if it were not
there (Bengio et al. 2013, arXiv 1308.3432, "straight-through").
"""

import torch

from ops.linear import InPlaceOf
from ops.recipe import EMULATED, Forms, Recipe


class Int8Linear(InPlaceOf):
    """Keeps the codes (N, K) int8 and the steps (N, 1) of its weight, made anew after each update."""

    def __init__(self, layer):
        super().__init__(layer)
        self.codes = torch.zeros_like(layer.weight, dtype=torch.int8)
        self.steps = torch.ones(len(layer.weight), 1, device=layer.weight.device)

    def operands(self, dtype):
        weight, inside, after = super().operands(dtype)
        rounded = (self.codes * self.steps).to(dtype)
        return rounded + (weight - weight.detach()), inside, after

    def copies(self):
        return {"codes": self.codes, "steps": self.steps}

    @staticmethod
    def refresh(layers):
        for layer in layers:
            weight = layer.weight.float()
            layer.steps.copy_(weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127)
            layer.codes.copy_((weight / layer.steps).round())


class Int8Weights(Recipe):
    native_needs = "kernels that multiply int8, which this recipe has not"

    @classmethod
    def support(cls, here):
        return EMULATED

    @classmethod
    def forms(cls, native):
        both = Forms(weight=1.0)
        return both, both

    def convert(self, layer, number, in_head):
        return Int8Linear(layer)

    @property
    def executed(self):
        return "bf16, weights of int8"


RECIPE = Int8Weights
